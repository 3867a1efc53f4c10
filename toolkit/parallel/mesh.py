"""The device mesh of a run and the groups that each technique uses.

Dimensions, outermost first: ``dp_replicate`` × ``dp_shard``. Ranks next to each other lie in the same
``dp_shard`` group, so that the heavier traffic stays inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Mesh:
    """``world`` has all dimensions; ``fsdp`` is what ``fully_shard`` takes (2-D where it replicates)."""

    world: DeviceMesh
    dp_replicate: int
    dp_shard: int

    @property
    def fsdp(self) -> DeviceMesh:
        return self.world if self.dp_replicate > 1 else self.world["dp_shard"]

    @property
    def dp_size(self) -> int:
        """How many ways a global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which part of a global batch this rank reads."""
        return self.world.get_local_rank("dp_replicate") * self.dp_shard + self.world.get_local_rank(
            "dp_shard"
        )

    def __str__(self) -> str:
        return f"dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard}"


def build_mesh(device: torch.device, *, dp_replicate: int, dp_shard: int) -> Mesh:
    """Lay the world out; the degrees multiply to the world size."""
    world = init_device_mesh(
        device.type, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return Mesh(world, dp_replicate, dp_shard)
