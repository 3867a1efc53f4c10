"""FSDP2: parameters, gradients and optimizer state are sharded per unit over the data-parallel ranks.

Gradients are *summed* over ranks, never averaged: the loss is already divided by the token count of the
global batch, so ranks with different token counts are weighted correctly. gloo has no pre-multiplied sum, so
:func:`_sum_gradients` makes both calls for each unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from toolkit import cpu
from toolkit.config.parallelism import Parallelism
from toolkit.config.training import Training
from toolkit.cpu.shared_memory import SharedMemory, share_memory
from toolkit.distributed.dtensor import clean_name, local
from toolkit.distributed.process_group import DTYPES, GLOO
from toolkit.hardware import device_type
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import Experts
from toolkit.models.common.parameter_table import EMBEDDING
from toolkit.models.parameters import table
from toolkit.parallel.dims import reshard_after_forward

if TYPE_CHECKING:  # imported only by runs that use it
    from toolkit.parallel.bitwise import BitwiseSums

SKIP_DEVICES = ("cuda",)
"""Devices on which parallelism.fsdp_skip_on_one_rank takes effect."""


def mixed_precision(training: Training, param_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy: compute in ``param_dtype``, reduce and output dtypes of
    ``training``.

    Inputs are not cast: the embedding returns ``param_dtype``, and RoPE rotations keep their precision.
    """
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        output_dtype=DTYPES.get(training.mixed_precision_output),
        cast_forward_inputs=False,
    )


def apply_fsdp(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    parallelism: Parallelism,
    *,
    expert_mesh: DeviceMesh | None = None,
    precision: MixedPrecisionPolicy,
    cpu_offload: bool = False,
    bitwise: BitwiseSums | None = None,
) -> None:
    """Shard each unit, then the remaining parameters as the root unit, in place.

    ``units`` are in forward order; nested units follow their outer unit. ``mesh`` is 1-D (shard) or 2-D
    (replicate × shard); under expert parallelism, experts are units of their own on ``expert_mesh``. Logits
    have the policy's ``output_dtype``. ``bitwise`` sums gradients in an order that is the same on any mesh.
    """
    if expert_mesh is not None:
        units = _with_experts(model, units)

    def mesh_of(module: nn.Module) -> DeviceMesh:
        return expert_mesh if expert_mesh is not None and isinstance(module, Experts) else mesh

    inner = replace(precision, output_dtype=None)
    pinned = mesh.device_type == "cuda"  # pinning memory fails without CUDA
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    when = reshard_after_forward(parallelism)
    ignored = set() if cpu_offload or bitwise else _ignored_parameters(model, mesh, parallelism, precision)
    # Reversed, because fully_shard must be called on inner units first.
    for position in reversed(range(len(units))):
        unit = units[position]
        its_mesh = mesh_of(unit[0])
        fully_shard(
            list(unit),
            mesh=its_mesh,
            shard_placement_fn=partial(_placement, ranks=its_mesh.size(its_mesh.ndim - 1)),
            mp_policy=inner,
            offload_policy=offload,
            reshard_after_forward=_reshard(when, last=position == len(units) - 1),
            ignored_params=ignored,
        )
    returns_hidden = getattr(model, "output", model) is None  # a pipeline stage without the head
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=inner if returns_hidden else precision,
        offload_policy=offload,
        reshard_after_forward=_reshard(when, last=True),
        ignored_params=ignored,
    )
    of_mesh: dict[DeviceMesh, list[FSDPModule]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            of_mesh[mesh_of(module)].append(module)
    for its_mesh, sharded_units in of_mesh.items():
        memory = None
        if cpu.is_enabled() and mesh.device_type == "cpu" and not isinstance(when, int):
            memory = _share_memory(sharded_units, its_mesh)
        if bitwise is not None:
            for sharded in sharded_units:
                sharded.set_custom_reduce_scatter(cast("Any", bitwise.reduce_scatter(its_mesh, memory)))
        elif _skips_reduce_scatter(its_mesh):
            for sharded in sharded_units:
                sharded.set_custom_reduce_scatter(cast("Any", NoReduceScatter()))
        if its_mesh.size() > 1:  # on one rank, it would copy each unit's gradients just to divide them by 1
            _sum_gradients(sharded_units)
    _keep_embeddings_sharded_in_backward(units)
    _prefetch([model, *(unit[0] for unit in units)], parallelism)


def _ignored_parameters(
    model: nn.Module, mesh: DeviceMesh, parallelism: Parallelism, precision: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """Return the parameters to exclude from FSDP on one rank, where it would copy each of them twice per
    step.

    These parameters are stored in the compute dtype, so no cast is needed. Gradients accumulate in that
    dtype, as they do under FSDP when it reduces each micro-batch.
    """
    skips = parallelism.fsdp_skip_on_one_rank and device_type(mesh.device_type) in SKIP_DEVICES
    if dist.get_world_size() > 1 or not skips:
        return set()
    dtype = precision.param_dtype
    return {
        parameter
        for parameter in model.parameters()
        if (parameter.dtype == dtype and (parallelism.fsdp_sync_each_batch or not parameter.requires_grad))
        or not parameter.is_floating_point()
    }


def root_modules(model: Decoder) -> set[nn.Module]:
    """Return the modules that must stay in FSDP's root unit: a tied embedding, which forward reads at both
    ends."""
    embedding = table(model.args)[EMBEDDING]
    return {model.tok_embeddings} if model.tok_embeddings is not None and not embedding.unit else set()


def fsdp_units(model: Decoder) -> list[list[nn.Module]]:
    """Return the modules of each FSDP unit of ``model``, or of a stage of it, in forward order."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # a wrapper comes before its module
        modules.setdefault(clean_name(name), module)
    units = [[modules[name] for name in unit if name in modules] for unit in table(model.args).units()]
    return [unit for unit in units if unit]


def begin_micro_batch(model: nn.Module, parallelism: Parallelism, *, last: bool) -> None:
    """Set up gradient reduction and resharding before a micro-batch's forward; ``last`` marks the last one of
    the step.

    By default each micro-batch reduce-scatters its gradients, which stay sharded, and the last one
    all-reduces over replicas. Without ``fsdp_sync_each_batch``, only the last one reduces, and gradients stay
    unsharded until then, in the reduce dtype. Parameters that are not resharded after forward ("never") also
    stay gathered until the next micro-batch.

    torch's ``set_is_last_backward(False)`` is not used: it skips FSDP's cleanup after a backward, so
    prefetching in the next backward would issue an unused all-gather.
    """
    root = _fsdp(model)
    if parallelism.fsdp_sync_each_batch:
        root.set_requires_all_reduce(last)
    else:
        root.set_requires_gradient_sync(last)
    if reshard_after_forward(parallelism) == "never":
        root.set_reshard_after_backward(last)


def _reshard(when: str | int, *, last: bool) -> bool | int:
    if when in ("always", "never"):
        return when == "always"
    if last:
        return False
    return True if isinstance(when, str) else when


def _sum_gradients(units: Sequence[FSDPModule]) -> None:
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _share_memory(units: Sequence[FSDPModule], mesh: DeviceMesh) -> SharedMemory | None:
    """Set up shared memory for the collectives of a gloo group if all its ranks are on this machine."""
    group = mesh.get_group(mesh.ndim - 1)
    if group.size() > 1 and dist.get_backend(group) == GLOO:
        return share_memory(units, group)
    return None


def _placement(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    """Return how to shard a parameter: the rows of each expert if there are more ranks than experts, of which
    some would have none; otherwise the first dimension."""
    shape = local(parameter).shape
    return Shard(1) if len(shape) == 3 and shape[0] < ranks and shape[1] % ranks == 0 else None


def _with_experts(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[Sequence[nn.Module]]:
    """Add experts as units, each after the unit that contains it; experts that no unit contains come last."""
    all_units: list[Sequence[nn.Module]] = []
    for unit in [*units, [model]]:
        if unit not in all_units:
            all_units.append(unit)
        inside = (inner for module in unit for inner in module.modules())
        all_units += [[inner] for inner in inside if isinstance(inner, Experts) and [inner] not in all_units]
    all_units.remove([model])
    return all_units


def _skips_reduce_scatter(mesh: DeviceMesh) -> bool:
    """Return whether to use :class:`NoReduceScatter`. On CUDA, the all-reduce over replicas reads gradients
    on another stream without recording it."""
    return mesh.size(mesh.ndim - 1) == 1 and (mesh.device_type == "cpu" or mesh.size() == 1)


class NoReduceScatter:
    """Reduce-scatter for a group of one rank: returns the input, which torch would copy."""

    def __init__(self) -> None:
        self.input: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # torch allocates first the input, then the output.
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        output, self.input = self.input, None
        if output.is_cuda:
            # Allocated on the stream of backward, read on the stream of the reduction: without this record,
            # its memory would be reused for the next unit's gradients while an in-backward update still reads
            # it.
            output.record_stream(torch.cuda.current_stream())
        return output

    def __call__(self, *_: object, **__: object) -> None:
        return None


def _keep_embeddings_sharded_in_backward(units: Sequence[Sequence[nn.Module]]) -> None:
    """Disable the all-gather of embeddings in backward, which does not read their weight."""
    for unit in units:
        if all(isinstance(module, nn.Embedding) for module in unit):
            _fsdp(unit[0]).set_unshard_in_backward(False)


def _prefetch(modules: Sequence[nn.Module], parallelism: Parallelism) -> None:
    """Set the units that each unit prefetches.

    ``modules``: the root and the first module of each unit, in the order in which their forwards begin.
    """
    if depth := parallelism.fsdp_forward_prefetch:
        nested: set[nn.Module] = set()
        for position, module in enumerate(modules):
            ahead = modules[position + 1 : position + 1 + depth]
            # In backward, activation checkpointing reruns nested units after the next block's backward.
            if module in nested:
                ahead = [other for other in ahead if other in nested]
            elif position:
                nested = set(module.modules())
            _fsdp(module).set_modules_to_forward_prefetch([_fsdp(other) for other in ahead])
    if (depth := parallelism.fsdp_backward_prefetch) > 1:  # torch prefetches one by default
        backward = in_end_order(modules)[::-1]
        for position, module in enumerate(backward):
            ahead = backward[position + 1 : position + 1 + depth]
            _fsdp(module).set_modules_to_backward_prefetch([_fsdp(other) for other in ahead])


def in_end_order(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Reorder modules from the start order of their forwards to the end order."""
    ended: list[nn.Module] = []
    running: list[nn.Module] = []
    for module in modules:
        while running and module not in set(running[-1].modules()):
            ended.append(running.pop())
        running.append(module)
    return ended + running[::-1]


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
