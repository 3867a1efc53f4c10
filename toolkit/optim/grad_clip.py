"""The global gradient norm and clipping, exact for parameters sharded over any mix of meshes.

Every rank sums the squares of its local gradients in fp64, each divided by the number of ranks with the same
values (the replicate dimensions of its DTensor). One all-reduce over the world then counts every element
once. The device is not synchronized. torch's ``clip_grad_norm_`` reduces per mesh and per tensor; this
function reduces one scalar, and the layout affects it only by fp64 rounding.
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

# As in torch.nn.utils.clip_grad_norm_.
EPSILON = 1e-6
_CHUNK = 1 << 17
"""Number of elements in fp64 at a time."""


def global_norm(
    parameters: Iterable[nn.Parameter],
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute the 2-norm of all gradients of ``parameters`` over the ranks of ``group`` (default: all ranks).

    Parameters without a gradient are skipped. Returns an fp64 scalar on ``device``, the same on every rank.
    Every rank of ``group`` must call this with its own parameters, and pass ``device`` if gradients are
    offloaded or a rank may have none.

    Raises:
        ValueError: a gradient is Partial; or it is a plain tensor in a group of several ranks, where it is
            unknown whether it is sharded or replicated.
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
    """Return this rank's contribution to a gradient's squared 2-norm, an fp64 scalar; the contributions of
    all ranks add up to it."""
    return norms([local(gradient)])[0].square_() / _replicas(gradient, _distributed(None))


def norm_over_ranks(
    square: Tensor, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the square root of the sum of ``square`` over ranks, an fp64 scalar, on ``device``."""
    # CUDA stages eight bytes of pageable memory before the call returns, without synchronizing.
    total = square.to(device, non_blocking=True) if device else square
    if _distributed(group):
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def clip_(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale the gradients in place so that their global norm, currently ``norm``, is at most ``max_norm``.

    A ``max_norm`` that is infinite or not positive disables clipping (in torchtitan, 0 would set every
    gradient to zero). ``norm`` is a number on the host, so that gradients within the limit are not read.
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
    """Return the 2-norm of each tensor, accumulated in fp64 without copying the tensor to fp64."""
    if tensors[0].is_cuda:
        return list(foreach_norm(tensors, 2, dtype=torch.float64))
    # On CPU torch's norms with another dtype are not vectorized: nine times slower than dot products of
    # chunks cast into a buffer that stays in cache.
    buffer = torch.empty(_CHUNK, dtype=torch.float64)
    norm = _fake_norm if is_simulated() else _chunked_norm
    return [norm(tensor, buffer) for tensor in tensors]


def _fake_norm(tensor: Tensor, _: Tensor) -> Tensor:
    """Return the norm in one operation: chunks would take half the time of a simulated step."""
    return torch.linalg.vector_norm(tensor.flatten(), dtype=torch.float64)


def _chunked_norm(tensor: Tensor, buffer: Tensor) -> Tensor:
    squares = []
    for chunk in tensor.flatten().split(_CHUNK):
        exact = buffer[: len(chunk)].copy_(chunk)
        squares.append(torch.dot(exact, exact))
    return torch.stack(squares).sum().sqrt()


def _distributed(group: dist.ProcessGroup | None) -> bool:
    return dist.is_initialized() and dist.get_world_size(group) > 1


def _replicas(gradient: Tensor, distributed: bool) -> int:
    if not isinstance(gradient, DTensor):
        if distributed:
            raise ValueError(
                "a plain gradient with several ranks: it is unknown whether it is sharded or replicated"
            )
        return 1
    replicas = 1
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(
                f"a gradient is still {placement}: it must be reduced before its norm is computed"
            )
        if placement.is_replicate():
            replicas *= gradient.device_mesh.size(dimension)
    return replicas
