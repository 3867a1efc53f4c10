"""FSDP2: parameters, gradients and optimizer state sharded per unit over the data-parallel ranks.

Gradients are *summed* over ranks, never averaged: the loss is already divided by the tokens of the
global batch, so that uneven ranks weigh as they should. gloo has no pre-multiplied sum, hence both
calls in :func:`_sum_gradients`; neither recurses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

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

from toolkit import cpu
from toolkit.config.parallelism import Parallelism
from toolkit.config.training import Training
from toolkit.cpu.shared_memory import share_memory
from toolkit.distributed.process_group import DTYPES, GLOO
from toolkit.hardware import device_type
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.table import EMBEDDING
from toolkit.models.parameters import table
from toolkit.parallel.dims import reshard_after_forward

SKIPPING = ("cuda",)
"""Devices on which parallelism.fsdp_skip_on_one_rank acts."""


def mixed_precision(training: Training, param_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in ``param_dtype``; reduce gradients and hand out logits as ``training`` has it.

    Inputs are not cast: the embedding hands out ``param_dtype`` and RoPE tables stay in their own precision.
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
    precision: MixedPrecisionPolicy,
    cpu_offload: bool = False,
) -> None:
    """Shard each unit, then what is left in the root, in place.

    ``units`` are in forward order, a unit inside another after it. ``mesh`` is 1-D (shard) or 2-D
    (replicate × shard). Logits are of ``output_dtype``.
    """
    inner = replace(precision, output_dtype=None)
    # Page-locked memory is CUDA's: where there is none, asking for it fails.
    pinned = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
    when = reshard_after_forward(parallelism)
    kept = set() if cpu_offload else _kept_out(model, mesh, parallelism, precision)
    # Backwards, since fully_shard wants the inner of two units first.
    for position in reversed(range(len(units))):
        fully_shard(
            list(units[position]),
            mesh=mesh,
            mp_policy=inner,
            offload_policy=offload,
            reshard_after_forward=_reshard(when, last=position == len(units) - 1),
            ignored_params=kept,
        )
    hands_on = getattr(model, "output", model) is None  # hidden states, to the next stage of a pipeline
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=inner if hands_on else precision,
        offload_policy=offload,
        reshard_after_forward=_reshard(when, last=True),
        ignored_params=kept,
    )
    if cpu.is_enabled() and mesh.device_type == "cpu" and not isinstance(when, int):
        _share_memory(model, mesh)
    if _reduces_alone(mesh):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(cast("Any", Whole()))
    if mesh.size() > 1:  # what is alone torch would still divide, by 1 into a copy of each unit's gradients
        _sum_gradients(model)
    _spare_embeddings(units)
    _prefetch([model, *(unit[0] for unit in units)], parallelism)


def _kept_out(
    model: nn.Module, mesh: DeviceMesh, parallelism: Parallelism, precision: MixedPrecisionPolicy
) -> set[nn.Parameter]:
    """The parameters that a run of one rank leaves out of FSDP, which would copy each of them twice a step.

    They are stored in the precision in which they are computed with, so that nothing is cast. Gradients are
    then added up in that precision, as FSDP does where it reduces each micro-batch.
    """
    skips = parallelism.fsdp_skip_on_one_rank and device_type(mesh.device_type) in SKIPPING
    if dist.get_world_size() > 1 or not skips:
        return set()
    computed = precision.param_dtype
    return {
        parameter
        for parameter in model.parameters()
        if (parameter.dtype == computed and (parallelism.fsdp_sync_each_batch or not parameter.requires_grad))
        or not parameter.is_floating_point()
    }


def root_modules(model: Decoder) -> set[nn.Module]:
    """Modules that no unit may hold, since both ends of the forward need them: a tied embedding."""
    embedding = table(model.args)[EMBEDDING]
    return {model.tok_embeddings} if model.tok_embeddings is not None and not embedding.unit else set()


def fsdp_units(model: Decoder) -> list[list[nn.Module]]:
    """Groups of modules of ``model``, or of a stage of it, each one FSDP unit, in forward order."""
    there = dict(model.named_modules())
    units = [[there[name] for name in unit if name in there] for unit in table(model.args).units()]
    return [unit for unit in units if unit]


def begin_micro_batch(model: nn.Module, parallelism: Parallelism, *, last: bool) -> None:
    """Say before each forward whether it is the step's last: what is communicated depends on it.

    By default a micro-batch is reduce-scattered (so gradients stay sharded) and replicas are
    all-reduced once, in the last. Without ``fsdp_sync_each_batch`` nothing is reduced before the last, and
    gradients stay whole until then, in the reduce precision. Parameters that are kept for backward
    ("never") are kept for the next micro-batch too.

    torch's ``set_is_last_backward`` is left alone: without the clean-up at the end of a backward, the
    next one would prefetch past its first unit, an all-gather that nothing uses.
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


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _share_memory(model: nn.Module, mesh: DeviceMesh) -> None:
    """Communicate through shared memory within a group of gloo's that is on one machine; else leave it."""
    group = mesh.get_group(mesh.ndim - 1)
    if group.size() > 1 and dist.get_backend(group) == GLOO:
        share_memory(model, group)


def _reduces_alone(mesh: DeviceMesh) -> bool:
    """Say if :class:`Whole` reduces the gradients. On CUDA the all-reduce of replicas reads them on a stream
    that it does not know."""
    return mesh.size(mesh.ndim - 1) == 1 and (mesh.device_type == "cpu" or mesh.size() == 1)


class Whole:
    """The reduce-scatter of a rank that is alone: its gradients are the sum, in the memory that they were
    copied to, of which torch would make another copy."""

    def __init__(self) -> None:
        self.given: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # torch asks for the input, and then for the output.
        if self.given is None:
            self.given = torch.empty(*size, dtype=dtype, device=device)
            return self.given
        given, self.given = self.given, None
        if given.is_cuda:
            # Allocated on the stream of backward, read on this one, of the reduction: without the record its
            # memory would go to the next unit's gradients while an update in backward still reads it.
            given.record_stream(torch.cuda.current_stream())
        return given

    def __call__(self, *_: object, **__: object) -> None:
        return None


def _spare_embeddings(units: Sequence[Sequence[nn.Module]]) -> None:
    """The backward of a lookup does not read the table: do not gather it."""
    for unit in units:
        if all(isinstance(module, nn.Embedding) for module in unit):
            _fsdp(unit[0]).set_unshard_in_backward(False)


def _prefetch(modules: Sequence[nn.Module], parallelism: Parallelism) -> None:
    """Have each unit ask for the next ones.

    ``modules``: the root and the first module of each unit, in the order in which their forwards begin.
    """
    if depth := parallelism.fsdp_forward_prefetch:
        held: set[nn.Module] = set()
        for position, module in enumerate(modules):
            ahead = modules[position + 1 : position + 1 + depth]
            # Activation checkpointing runs inner units again in backward, when the next block is done.
            if module in held:
                ahead = [other for other in ahead if other in held]
            elif position:
                held = set(module.modules())
            _fsdp(module).set_modules_to_forward_prefetch([_fsdp(other) for other in ahead])
    if (depth := parallelism.fsdp_backward_prefetch) > 1:  # one is what torch does by itself
        backward = by_end(modules)[::-1]
        for position, module in enumerate(backward):
            ahead = backward[position + 1 : position + 1 + depth]
            _fsdp(module).set_modules_to_backward_prefetch([_fsdp(other) for other in ahead])


def by_end(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules in the order in which their forwards end, from that in which they begin."""
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
