"""FSDP2: parameters, gradients and optimizer state sharded per unit over the data-parallel ranks.

Gradients are *summed* over ranks, never averaged: the loss is already divided by the tokens of the
global batch, so that uneven ranks weigh as they should. gloo has no pre-multiplied sum, hence both
calls in :func:`_sum_gradients`; neither recurses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Sharding:
    """How units are stored, computed and communicated.

    ``reshard_after_forward`` "always" frees every unit's full parameters after its forward, "never"
    keeps them for backward; "default" frees all but the last unit's, which backward needs at once; a
    number keeps them sharded over that many ranks.
    """

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None = None
    reshard_after_forward: str | int = "default"
    forward_prefetch: int = 0
    backward_prefetch: int = 1
    cpu_offload: bool = False
    sync_each_batch: bool = True


def apply_fsdp(
    model: nn.Module, units: Sequence[Sequence[nn.Module]], mesh: DeviceMesh, options: Sharding
) -> None:
    """Shard each unit, then what is left in the root, in place.

    ``units`` are in forward order. ``mesh`` is 1-D (shard) or 2-D (replicate × shard). Inputs are not
    cast: the embedding hands out ``param_dtype`` and RoPE tables stay in their own precision.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype, cast_forward_inputs=False
    )
    when = options.reshard_after_forward
    for position, unit in enumerate(units):
        last = position == len(units) - 1
        reshard = when == "always" or (when == "default" and not last)
        fully_shard(list(unit), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=when == "always")
    _sum_gradients(model)


def begin_micro_batch(model: nn.Module, options: Sharding, *, last: bool) -> None:
    """Say before each forward whether it is the step's last: what is communicated depends on it.

    Reduce-scatter each micro-batch (so gradients stay sharded); all-reduce over replicas once.
    """
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    model.set_requires_all_reduce(last)


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
