"""The order in which parallelism techniques are applied to a model on the meta device.

A technique modifies or wraps modules in place; only compile replaces a module's forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.fsdp import MixedPrecisionPolicy

from toolkit.config.parallelism import ActivationCheckpoint, Compile, Parallelism
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import table
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint, routers_of
from toolkit.parallel.fsdp import apply_fsdp, fsdp_units
from toolkit.parallel.mesh import Mesh

if TYPE_CHECKING:  # imported only by runs that use them
    from toolkit.parallel.bitwise import BitwiseSums
    from toolkit.parallel.sequence_shards import SequenceShards


def parallelize(
    model: Decoder,
    mesh: Mesh,
    *,
    parallelism: Parallelism,
    checkpointing: ActivationCheckpoint,
    compiling: Compile,
    precision: MixedPrecisionPolicy,
    cpu_offload: bool = False,
    shards: SequenceShards | None = None,
    ring: bool = False,
    pareto_folder: Path | None = None,
    bitwise: BitwiseSums | None = None,
) -> None:
    """Parallelize ``model``, or a pipeline stage of it, in place. ``fully_shard`` applies even on one rank.

    If ``shards`` is None, sequences are not split; ``ring`` selects ring attention.
    """
    if mesh.ep:
        from toolkit.parallel.expert_parallel import apply_expert_parallel

        apply_expert_parallel(model, mesh.ep, split_width=mesh.ep_etp is not None)
    if mesh.tp:
        from toolkit.parallel.tensor_parallel import apply_tensor_parallel

        plan = table(model.args).tensor_plan()
        if mesh.ep and not mesh.ep_etp:
            plan = {module: style for module, style in plan.items() if style not in ("experts", "moe")}
        apply_tensor_parallel(
            model, plan, mesh.tp, expert_mesh=mesh.ep_etp, loss_parallel=not parallelism.disable_loss_parallel
        )
    if shards:
        from toolkit.parallel.context_parallel import apply_context_parallel

        assert mesh.cp
        apply_context_parallel(model, shards, mesh.cp, ring=ring)
    # torch 2.13 cannot compile a checkpointed block of DTensors without a policy, such as the one that keeps
    # the choices of routers, but can checkpoint a compiled block.
    policy = checkpointing.by_operator or (compiling.blocks and bool(routers_of(model)))
    outside = bool(mesh.tp) and checkpointing.mode in ("full", "selective") and not policy
    # Sets the compiler's memory budget even if no block is wrapped.
    checkpoints = checkpointing.mode != "none" or compiling.enable
    if checkpoints and not outside:
        apply_activation_checkpoint(
            model.layers, checkpointing, compiled=compiling.blocks, pareto_folder=pareto_folder
        )
    if compiling.enable:
        from toolkit.parallel.compile import apply_compile

        group = mesh.tp.get_group() if mesh.tp and parallelism.enable_async_tensor_parallel else None
        apply_compile(model, compiling, group)
    if outside:
        apply_activation_checkpoint(model.layers, checkpointing, pareto_folder=pareto_folder)
    if mesh.tp and parallelism.tensor_parallel_recompute_allgather:
        from toolkit.parallel.tensor_parallel import recompute_gathers

        recompute_gathers(model.layers)
    if checkpointing.enable_activation_offloading:
        from toolkit.parallel.activation_offload import apply_activation_offload

        apply_activation_offload(model.layers, prefetch=checkpointing.offload_prefetch)
    if parallelism.fsdp_wrap_policy == "block":
        units = fsdp_units(model)
    else:
        from toolkit.parallel.fsdp_wrap import wrapped_units

        units = wrapped_units(model, parallelism)
    apply_fsdp(
        model,
        units,
        mesh.fsdp,
        parallelism,
        expert_mesh=mesh.expert_fsdp,
        precision=precision,
        cpu_offload=cpu_offload,
        bitwise=bitwise,
    )
