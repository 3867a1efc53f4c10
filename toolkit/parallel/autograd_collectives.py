"""Differentiable collectives: all-gather and reduce-scatter are each other's backward.

The functions use torch's functional collectives, which torch.compile traces and can overlap with matmuls.
They wait at once: torch 2.13 drops the gradient of a pending collective that enters a compiled block.

torch gathers and scatters along the first dimension; other dimensions need a copy, unless all preceding
dimensions have size 1 (a single sequence).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.compat import unsafe_view
from toolkit.distributed import collectives

always_copy = False
"""Set for asynchronous tensor parallelism: inductor recognizes collectives to fuse with matmuls by this
copy."""


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``x`` along ``dim``, in rank order. The backward is a reduce-scatter, because the gradient
    of the result is a partial sum on each rank."""
    return _Gather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over ranks and return this rank's chunk along ``dim``."""
    return _ReduceScatter.apply(x, dim, group)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over ranks. All ranks compute the same values from the sum, so its backward is the
    identity."""
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
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.dim, ctx.group), None, None


# unsafe_view, because FSDP warns if a unit, such as the embedding, returns a view that autograd tracks.


def _all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    chunks = collectives.all_gather(x.contiguous(), size, group.group_name)
    if _is_view(x, dim):
        return unsafe_view(chunks, (*x.shape[:dim], -1, *x.shape[dim + 1 :]))
    return torch.cat(chunks.chunk(size), dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    is_view = _is_view(x, dim)
    chunks = x.contiguous().flatten(0, dim) if is_view else torch.cat(x.chunk(size, dim))
    chunk = collectives.reduce_scatter(chunks, size, group.group_name)
    return unsafe_view(chunk, (*x.shape[:dim], *chunk.shape)) if is_view else chunk


def _is_view(x: Tensor, dim: int) -> bool:
    """Return whether concatenating chunks along ``dim`` in the first dimension is a view of the result."""
    return dim == 0 or (x.shape[:dim].numel() == 1 and not always_copy)
