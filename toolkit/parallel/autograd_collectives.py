"""Collectives within a forward. Those with gradients are each other's backward.

They are torch's functional ones, which torch.compile traces and can overlap with matmuls, waited for on
the spot: torch 2.13 drops the gradient of one that is still under way where it enters a compiled block.

torch gathers and scatters along the first dimension. Along another one, parts are put in order by a copy,
save where there is only one row of them (a single sequence), whose memory is in order already.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.compat import unsafe_view
from toolkit.distributed import collectives

always_copy = False
"""Set for asynchronous tensor parallelism: torch finds what it can fuse with matmuls by its copy."""


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts put together along ``dim``, in rank order. Each rank's gradient of the whole is
    its share of it: shares are summed, and a rank gets its part back."""
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks."""
    return _ReduceScatter.apply(x, dim, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, on each of them. All make the same of it: the gradient of the sum, which each has
    whole, is that of its own part."""
    return _AllReduce.apply(x, group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.all_reduce(x.contiguous(), "sum", group.group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.dim, ctx.group), None, None


def _gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    parts = collectives.all_gather(x.contiguous(), size, group.group_name)
    if _in_order(x, dim):
        return _as_shape(parts, (*x.shape[:dim], -1, *x.shape[dim + 1 :]))
    return torch.cat(parts.chunk(size), dim)


def _scattered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    ordered = _in_order(x, dim)
    parts = x.contiguous().flatten(0, dim) if ordered else torch.cat(x.chunk(size, dim))
    part = collectives.reduce_scatter(parts, size, group.group_name)
    return _as_shape(part, (*x.shape[:dim], *part.shape)) if ordered else part


def _as_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view that autograd does not know for one: FSDP warns where a unit, the embedding, returns one."""
    return unsafe_view(x, shape)


def _in_order(x: Tensor, dim: int) -> bool:
    """Say if parts along ``dim`` that lie one after another in memory are the whole."""
    return dim == 0 or (x.shape[:dim].numel() == 1 and not always_copy)
