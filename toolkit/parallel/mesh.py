"""The device mesh and the process groups of each technique.

The dimensions, outermost first, are ``pp`` × ``dp_replicate`` × ``dp_shard`` × ``cp`` × ``tp``. Adjacent
ranks form ``tp`` groups first, then ``cp`` and ``dp_shard`` groups, so that the heaviest traffic stays inside
a node. Parameters are sharded over ``dp_shard`` and ``cp`` together: ranks with chunks of the same sequence
use the same weights and sum their gradients, like data-parallel ranks.

Expert parallelism divides the same ranks, dp_shard × cp × tp, differently. Groups of ``ep`` adjacent ranks
share the experts of each layer, and FSDP shards each expert over ``efsdp``, the ranks across these groups.
``etp`` is the innermost dimension if tensor parallelism splits experts too, and otherwise 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.compat import flatten_mesh, unflatten_mesh


@dataclass(frozen=True)
class Mesh:
    """Device meshes of a run. ``fsdp`` is the mesh for ``fully_shard``, 2-D with replication;
    ``pp``, ``cp``, ``tp`` and ``ep`` are 1-D, and None if their size is 1. ``ep_etp`` is the 2-D mesh of
    experts whose width is split. ``expert_fsdp`` is the mesh for ``fully_shard`` of experts under expert
    parallelism."""

    world: DeviceMesh
    fsdp: DeviceMesh
    pp: DeviceMesh | None
    cp: DeviceMesh | None
    tp: DeviceMesh | None
    ep: DeviceMesh | None
    ep_etp: DeviceMesh | None
    expert_fsdp: DeviceMesh | None
    dp_size: int
    """Number of shards of a global batch."""
    dp_rank: int
    """Shard of the global batch that this rank reads; equal within its pp, cp and tp groups."""
    is_loss_rank: bool
    """True on one rank of each pp and tp group: it counts values that the group shares, such as labels."""
    shape: str
    """Sizes for messages: "dp_replicate 1 × dp_shard 4"."""
    coordinates: str
    """This rank's coordinates for messages: " (dp_shard 1, tp 0)", or "" for a single process."""

    def __str__(self) -> str:
        return self.shape


def build_mesh(
    device: torch.device,
    *,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
) -> Mesh:
    """Build the mesh. The product of the degrees except ``ep`` and ``etp``, which divide dp_shard × cp × tp,
    must be the world size."""
    shard = "dp_shard_cp" if cp > 1 else "dp_shard"
    names = ("pp", "dp_replicate", shard, "tp")
    world = init_device_mesh(device.type, (pp, dp_replicate, dp_shard * cp, tp), mesh_dim_names=names)
    within = unflatten_mesh(world[shard], 0, (dp_shard, cp), ("dp_shard", "cp")) if cp > 1 else None
    of_experts = expert_fsdp = None
    if ep > 1:
        stage = flatten_mesh(world["dp_replicate", shard, "tp"])
        sizes_of_experts = (dp_replicate, dp_shard * cp * tp // (ep * etp), ep, etp)
        of_experts = unflatten_mesh(stage, 0, sizes_of_experts, ("expert_replicate", "efsdp", "ep", "etp"))
        expert_fsdp = of_experts["efsdp"]
        if dp_replicate > 1:
            expert_fsdp = of_experts["expert_replicate", "efsdp"]
    shard_rank = world.get_local_rank(shard) // cp
    sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
    sizes |= {
        name: size for name, size in {"cp": cp, "tp": tp, "ep": ep, "etp": etp, "pp": pp}.items() if size > 1
    }
    ranks = {name: world.get_local_rank(name) for name in ("pp", "dp_replicate", "tp")}
    ranks |= {"dp_shard": shard_rank, "cp": world.get_local_rank(shard) % cp}
    ranks |= {name: of_experts.get_local_rank(name) if of_experts else 0 for name in ("ep", "etp")}
    coordinates = ", ".join(f"{name} {ranks[name]}" for name, size in sizes.items() if size > 1)
    return Mesh(
        world=world,
        fsdp=world["dp_replicate", shard] if dp_replicate > 1 else world[shard],
        pp=world["pp"] if pp > 1 else None,
        cp=within["cp"] if within else None,
        tp=world["tp"] if tp > 1 else None,
        ep=of_experts["ep"] if of_experts else None,
        ep_etp=of_experts["ep", "etp"] if of_experts and etp > 1 else None,
        expert_fsdp=expert_fsdp,
        dp_size=dp_replicate * dp_shard,
        dp_rank=ranks["dp_replicate"] * dp_shard + shard_rank,
        is_loss_rank=ranks["pp"] == 0 and ranks["tp"] == 0,
        shape=" × ".join(f"{name} {size}" for name, size in sizes.items()),
        coordinates=f" ({coordinates})" if coordinates else "",
    )
