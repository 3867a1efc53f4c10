"""The global gradient norm and clipping by it, exact for parameters sharded over any mix of meshes.

Every rank sums the squares of its local gradients in fp64, each divided by the number of ranks that
hold the same values (the replicate dimensions of its DTensor); one all-reduce over the world then
counts every element once. Nothing waits for the device. Where torch's own
``clip_grad_norm_`` reduces per mesh and per tensor, this is one scalar, and it does not depend on the
layout beyond fp64 rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import foreach_mul_, foreach_norm
from toolkit.distributed.dtensor import local
from toolkit.hardware import is_simulated

# torch.nn.utils.clip_grad_norm_ adds this to the norm: the same clipping as everywhere else.
EPSILON = 1e-6
_PIECE = 1 << 17
"""Elements that are in fp64 at once."""


def global_norm(
    parameters: Iterable[nn.Parameter],
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The 2-norm of all gradients of ``parameters`` over the ranks of ``group`` (default: all ranks).

    Parameters without a gradient are left out. Returns an fp64 scalar on ``device``, the same on every
    rank. Every rank of ``group`` must call, each with the parameters it holds, and name the device if
    it is not the gradients' own (they may be offloaded, or a rank may hold none).

    Raises:
        ValueError: a gradient is Partial, or a plain tensor in a group of several ranks, so that what
            it contributes is unknown.
    """
    distributed = _distributed(group)
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and local(parameter.grad).numel():
            by_replicas[_replicas(parameter.grad, distributed)].append(local(parameter.grad))
    squares = [
        torch.stack(norms(gradients)).square_().sum() / replicas
        for replicas, gradients in by_replicas.items()
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return norm_over_ranks(total, device=device, group=group)


def local_square(gradient: Tensor) -> Tensor:
    """This rank's share of a gradient's squared 2-norm, an fp64 scalar: those of all ranks add up to it."""
    return norms([local(gradient)])[0].square_() / _replicas(gradient, _distributed(None))


def norm_over_ranks(
    square: Tensor, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The root of the sum over ranks of ``square``, an fp64 scalar, on ``device``."""
    # Eight bytes from the CPU are staged before the call returns: nothing waits, nothing is overwritten.
    total = square.to(device, non_blocking=True) if device else square
    if _distributed(group):
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def clip_(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale the gradients in place so that their global norm, now ``norm``, is at most ``max_norm``.

    ``max_norm`` of 0 or less, or infinite, leaves them as they are (torchtitan would set every
    gradient to zero at 0, which no one wants). Who calls has looked at the norm, so that a gradient
    that is small enough is not even read.
    """
    if max_norm <= 0 or math.isinf(max_norm):
        return
    scale = max_norm / (norm + EPSILON)
    if scale >= 1.0:
        return
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            by_kind[gradient.device, gradient.dtype].append(gradient)
    for gradients in by_kind.values():
        foreach_mul_(gradients, scale)


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, accumulated in fp64 without a copy of the tensor in fp64."""
    if tensors[0].is_cuda:
        return list(foreach_norm(tensors, 2, dtype=torch.float64))
    # torch's norms in another dtype are not vectorised here: nine times slower than products of pieces, cast
    # into memory that stays in a cache.
    cast = torch.empty(_PIECE, dtype=torch.float64)
    norm = _norm_of_fake if is_simulated() else _norm_by_pieces
    return [norm(tensor, cast) for tensor in tensors]


def _norm_of_fake(tensor: Tensor, _: Tensor) -> Tensor:
    """The norm in one operation: pieces would take half the time of a simulated step."""
    return torch.linalg.vector_norm(tensor.flatten(), dtype=torch.float64)


def _norm_by_pieces(tensor: Tensor, cast: Tensor) -> Tensor:
    squares = []
    for piece in tensor.flatten().split(_PIECE):
        exact = cast[: len(piece)].copy_(piece)
        squares.append(torch.dot(exact, exact))
    return torch.stack(squares).sum().sqrt()


def _distributed(group: dist.ProcessGroup | None) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1


def _replicas(gradient: Tensor, distributed: bool) -> int:
    if not isinstance(gradient, DTensor):
        if distributed:
            raise ValueError(
                "a plain gradient in a world of several ranks: is it sharded, or the same on all?"
            )
        return 1
    replicas = 1
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(
                f"a gradient is still {placement}: it has to be reduced before its norm is taken"
            )
        if placement.is_replicate():
            replicas *= gradient.device_mesh.size(dimension)
    return replicas
