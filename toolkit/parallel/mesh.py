"""The device mesh of a run and the groups that each technique uses.

Dimensions, outermost first: ``pp`` × ``dp_replicate`` × ``dp_shard`` × ``cp`` × ``tp``. Ranks next to each
other lie in the same ``tp`` group, the next ones in the same ``cp`` and ``dp_shard`` groups, so that the
heavier traffic stays inside a node. Parameters are sharded over ``dp_shard`` and ``cp`` together: ranks
that hold pieces of one sequence hold the same weights, and sum their gradients, as data-parallel ones do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.compat import unflatten_mesh


@dataclass(frozen=True)
class Mesh:
    """``fsdp`` is what ``fully_shard`` takes (2-D where it replicates); ``pp``, ``cp`` and ``tp`` are 1-D,
    and None where their size is 1."""

    world: DeviceMesh
    fsdp: DeviceMesh
    pp: DeviceMesh | None
    cp: DeviceMesh | None
    tp: DeviceMesh | None
    dp_size: int
    """How many ways a global batch is split."""
    dp_rank: int
    """Which part of a global batch this rank reads. Ranks of one pp, cp and tp group read the same."""
    is_loss_rank: bool
    """True on the rank that counts what those of its pp and tp groups have alike, such as labels."""
    shape: str
    """Sizes in words."""
    coordinates: str
    """Where this rank is, in words: " (dp_shard 1, tp 0)", or nothing of a single process."""

    def __str__(self) -> str:
        return self.shape


def build_mesh(
    device: torch.device, *, dp_replicate: int = 1, dp_shard: int = 1, pp: int = 1, cp: int = 1, tp: int = 1
) -> Mesh:
    """Lay the world out; the degrees multiply to the world size."""
    shard = "dp_shard_cp" if cp > 1 else "dp_shard"
    names = ("pp", "dp_replicate", shard, "tp")
    world = init_device_mesh(device.type, (pp, dp_replicate, dp_shard * cp, tp), mesh_dim_names=names)
    within = unflatten_mesh(world[shard], 0, (dp_shard, cp), ("dp_shard", "cp")) if cp > 1 else None
    sharder = world.get_local_rank(shard) // cp
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    sizes |= {name: size for name, size in {"cp": cp, "tp": tp, "pp": pp}.items() if size > 1}
    places = {name: world.get_local_rank(name) for name in ("pp", "dp_replicate", "tp")}
    places |= {"dp_shard": sharder, "cp": world.get_local_rank(shard) % cp}
    told = ", ".join(f"{name} {places[name]}" for name, size in sizes.items() if size > 1)
    return Mesh(
        world=world,
        fsdp=world["dp_replicate", shard] if dp_replicate > 1 else world[shard],
        pp=world["pp"] if pp > 1 else None,
        cp=within["cp"] if within else None,
        tp=world["tp"] if tp > 1 else None,
        dp_size=dp_replicate * dp_shard,
        dp_rank=world.get_local_rank("dp_replicate") * dp_shard + sharder,
        is_loss_rank=world.get_local_rank("pp") == 0 and world.get_local_rank("tp") == 0,
        shape=" × ".join(f"{name} {size}" for name, size in sizes.items()),
        coordinates=f" ({told})" if told else "",
    )
