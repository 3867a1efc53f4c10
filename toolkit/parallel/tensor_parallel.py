"""Tensor parallelism: each matrix split over ranks, hidden states between the blocks split by sequence.

A parameter becomes a DTensor over the tp mesh, so that sharding, checkpoints and initial weights know
which part of it a rank has. The forward computes with that part as a plain tensor and says where ranks
communicate (Megatron's column, row and sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198):
hidden states are gathered along the sequence before attention, feed-forward and head, and what rows of a
matrix contribute is summed and scattered along the sequence again. DTensor's own dispatch of each
operation is never paid so. Generation, whose sequences are of one token, keeps them whole: nothing is
gathered, and sums go to all ranks.

What each module does is data beside the model: a pattern of names and a style of :data:`STYLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from toolkit.loss import cross_entropy_sum, vocabulary_parallel_sum
from toolkit.parallel.autograd_collectives import all_reduce, gather, reduce_scatter

SEQUENCE = 1
"""The dimension of hidden states (B, S, D) that is split between blocks."""


@dataclass(frozen=True)
class Between:
    """How hidden states between the blocks lie on the ranks of ``group``: each has a piece of the sequence,
    or, without ``split``, all of it."""

    group: dist.ProcessGroup
    split: bool

    def whole(self, x: Tensor) -> Tensor:
        """What lies between the blocks, put together on every rank."""
        return gather(x, SEQUENCE, self.group) if self.split else x

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, as it lies between the blocks."""
        return reduce_scatter(x, SEQUENCE, self.group) if self.split else all_reduce(x, self.group)


def apply_tensor_parallel(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, *, split_sequence: bool = True
) -> None:
    """Split the modules of ``model``, on the meta device, in place: ``plan`` has styles by patterns of names,
    the first that fits. Without ``split_sequence`` sequences of any length pass, and no gradients.

    Raises:
        ValueError: a dimension to be split does not divide by the mesh, or a parameter is in no module of
            the plan, so that no rank would add the others' share of its gradient.
    """
    between = Between(mesh.get_group(), split_sequence)
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style:
            try:
                STYLES[style](module, mesh, between)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(f"the plan of tensor parallelism has no module of {', '.join(missing)}")


def local(weight: Tensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part; ``gradient`` is how its gradient relates to the whole one, where not as the part."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[gradient] if gradient else None)


def _split(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
            size = parameter.shape[placement.dim]
            raise ValueError(f"{name}: dimension {placement.dim} of size {size} on {mesh.size()} ranks")
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))


def _column(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Output features split: takes whole hidden states, gives this rank's features."""
    _split(module, mesh, Shard(0))

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight))

    module.forward = MethodType(forward, module)


def _row(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Input features split: takes this rank's features, gives the sum as it lies between the blocks."""
    _split(module, mesh, Shard(1))

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return between.summed(F.linear(x, local(self.weight)))

    module.forward = MethodType(forward, module)


def _norm(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """A norm of this rank's piece of the sequence: its weight is whole, its gradient a share."""
    _split(module, mesh, Replicate())

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, local(self.weight, Partial()), self.eps)

    module.forward = MethodType(forward, module)


def _gather_input(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """The pieces of the sequence put together once for all that the module does with them."""

    def whole(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return between.whole(args[0]), *args[1:]

    module.register_forward_pre_hook(whole)


def _embedding(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Entries split: each rank looks up those that it has, and gets its piece of the sequence."""
    _split(module, mesh, Shard(0))

    def forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        index = tokens - mesh.get_local_rank() * len(weight)
        mine = (index >= 0) & (index < len(weight))
        found = F.embedding(index * mine, weight) * mine[..., None]
        return between.summed(found)

    module.forward = MethodType(forward, module)


def _head(module: Any, mesh: DeviceMesh, between: Between, *, gathered: bool = False) -> None:
    """Vocabulary split: logits stay split within the loss, unless ``gathered``, and are gathered where there
    are no labels."""
    group = between.group
    _split(module, mesh, Shard(0))
    if gathered:
        module.loss = partial(_gathered_loss, group=group)
    else:
        module.loss = partial(_split_loss, rank=mesh.get_local_rank(), group=group)
    inner = type(module).forward

    def forward(self: Any, h: Tensor, labels: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        weight = local(self.weight if tied is None else tied)
        out = inner(self, between.whole(h), labels, weight)
        return _whole_logits(out, group) if labels is None else out

    module.forward = MethodType(forward, module)


def _split_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, rank: int, group: Any) -> Tensor:
    logits_TV = F.linear(h_TD, weight_VD)
    return vocabulary_parallel_sum(logits_TV, labels_T, first=rank * len(weight_VD), group=group)


def _gathered_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, group: Any) -> Tensor:
    return cross_entropy_sum(_whole_logits(F.linear(h_TD, weight_VD), group), labels_T)


def _whole_logits(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All logits, of which each rank computes the same: its own part's gradient is not summed over ranks."""
    return _Whole.apply(logits, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.part = x.shape[-1]
        ctx.first = ctx.part * dist.get_rank(group)
        return gather(x, x.ndim - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.first, ctx.part).contiguous(), None


STYLES: dict[str, Callable[[nn.Module, DeviceMesh, Between], None]] = {
    "column": _column,
    "row": _row,
    "norm": _norm,
    "gather": _gather_input,
    "embedding": _embedding,
    "head": _head,
    "gathered head": partial(_head, gathered=True),
}
