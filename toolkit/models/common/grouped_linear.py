"""Linear layers of several experts on rows sorted by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 8
"""torch's grouped_mm requires widths that are multiples of this: 16 bytes in bf16. Groups of rows may have
any size."""


def grouped_linear(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of each expert e, which end at ``ends_E[e]`` (int32), by its weight. Returns (M, N).

    On CUDA in bf16, torch's grouped_mm reads the ends on the device, so the host does not wait. Widths that
    are not multiples of 8, such as an adapter's rank, are padded by copies. Elsewhere a loop runs one matmul
    for each expert that has rows; on CPU it is as fast, and grouped_mm has no fp64.
    """
    if x_MK.is_cuda and x_MK.dtype == torch.bfloat16:
        width, (more_n, more_k) = weight_ENK.shape[1], (-size % _ALIGNMENT for size in weight_ENK.shape[1:])
        if more_n or more_k:
            x_MK, weight_ENK = F.pad(x_MK, (0, more_k)), F.pad(weight_ENK, (0, more_k, 0, more_n))
        return F.grouped_mm(x_MK, weight_ENK.transpose(-2, -1), offs=ends_E)[:, :width]
    return torch.ops.toolkit.grouped_linear(x_MK, weight_ENK, ends_E)


@torch.library.custom_op("toolkit::grouped_linear", mutates_args=())
def _grouped_linear(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    out_MN = x_MK.new_empty(len(x_MK), weight_ENK.shape[1])
    for expert, rows in _groups(ends_E):
        torch.mm(x_MK[rows], weight_ENK[expert].T, out=out_MN[rows])
    return out_MN


@torch.library.custom_op("toolkit::grouped_linear_weight_grad", mutates_args=())
def _weight_grad(grad_MN: Tensor, x_MK: Tensor, ends_E: Tensor) -> Tensor:
    grad_weight_ENK = grad_MN.new_zeros(len(ends_E), grad_MN.shape[1], x_MK.shape[1])
    for expert, rows in _groups(ends_E):
        torch.mm(grad_MN[rows].T, x_MK[rows], out=grad_weight_ENK[expert])
    return grad_weight_ENK


def _groups(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and the rows."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_MK, weight_ENK, ends_E = ctx.saved_tensors
    grad_MN, (x_needs, weight_needs, _) = grad_MN.contiguous(), ctx.needs_input_grad
    grad_x_MK = _grouped_linear(grad_MN, weight_ENK.transpose(1, 2), ends_E) if x_needs else None
    return grad_x_MK, _weight_grad(grad_MN, x_MK, ends_E) if weight_needs else None, None


# Not len(x_MK), which would make the number of rows a constant of a compiled graph.
_grouped_linear.register_fake(
    lambda x_MK, weight_ENK, ends_E: x_MK.new_empty(x_MK.shape[0], weight_ENK.shape[1])
)
_weight_grad.register_fake(
    lambda grad_MN, x_MK, ends_E: grad_MN.new_empty(len(ends_E), grad_MN.shape[1], x_MK.shape[1])
)
_grouped_linear.register_autograd(_backward, setup_context=_save)
