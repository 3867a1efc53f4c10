"""The order in which techniques are applied to a model on the meta device, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.llama.model import Llama
from toolkit.models.llama.sharding import fsdp_units, tensor_plan
from toolkit.parallel.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpoint
from toolkit.parallel.fsdp import Sharding, apply_fsdp
from toolkit.parallel.mesh import Mesh

if TYPE_CHECKING:  # read only by runs that use them
    from toolkit.parallel.compile import Compiling
    from toolkit.parallel.context_parallel import SequenceShards
    from toolkit.parallel.fsdp_wrap import Wrapping


def parallelize(
    model: Llama,
    mesh: Mesh,
    *,
    checkpointing: ActivationCheckpointing,
    compiling: Compiling | None,
    wrapping: Wrapping | None,
    sharding: Sharding,
    shards: SequenceShards | None = None,
    ring: bool = False,
    loss_parallel: bool = True,
) -> None:
    """Make ``model``, or a pipeline stage of it, a sharded one, in place. ``fully_shard`` is applied at every
    size, 1 included.

    ``compiling`` None is eager, ``wrapping`` None the model's own units, ``shards`` None whole sequences,
    of which ``ring`` hands keys and values from rank to rank.
    """
    if mesh.tp:
        from toolkit.parallel.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, tensor_plan(loss_parallel=loss_parallel), mesh.tp)
    if shards:
        from toolkit.parallel.context_parallel import apply_context_parallel

        assert mesh.cp
        apply_context_parallel(model, shards, mesh.cp, ring=ring)
    # torch 2.13 cannot compile a whole checkpointed block of DTensors; around the compiled block it can be.
    outside = bool(mesh.tp) and checkpointing.mode in ("full", "selective")
    if not outside:
        apply_activation_checkpoint(model.layers, checkpointing)
    if compiling:
        from toolkit.parallel.compile import apply_compile

        apply_compile(model, compiling, mesh.tp.get_group() if mesh.tp else None)
    if outside:
        apply_activation_checkpoint(model.layers, checkpointing)
    if wrapping:
        from toolkit.parallel.fsdp_wrap import wrapped_units

        units = wrapped_units(model, wrapping)
    else:
        units = fsdp_units(model)
    apply_fsdp(model, units, mesh.fsdp, sharding)
