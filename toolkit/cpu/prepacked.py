"""Matrices in the layout in which a CPU multiplies them, instead of rows.

oneDNN reorders a matrix of bf16 in each call, which for a few rows of input costs as much as the product, and
in fp32 torch takes another library's product, slower on some processors: with matrices reordered once a
product takes about half the time in either (benchmarks/LOG.md). The operations are those that torch's
compiler uses for frozen weights on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit import cpu
from toolkit.compat import linear_of_reordered, onednn_has_bf16, reorder_linear_weight

_ROWS = 8
"""Rows of inputs for which the layout is chosen; others are multiplied too."""
Packed = tuple[Tensor, Tensor | None]
"""A reordered matrix, and the bias of its products if there is one."""


def takes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies reordered matrices of ``dtype`` here: fp32, and bf16 where the CPU has
    instructions for it."""
    return (
        cpu.is_enabled()
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and onednn_has_bf16()))
    )


def reordered(weight: Tensor) -> Tensor:
    """Copy a matrix (out, in) into the layout."""
    return reorder_linear_weight(weight.detach(), _ROWS)


def joined(*linears: nn.Linear) -> Packed:
    """Join matrices and biases of layers with the same input into one reordered matrix and bias."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    packed = reordered(torch.cat([linear.weight for linear in linears]))
    return packed, torch.cat(biases) if biases else None


def multiply(x: Tensor, packed: Packed) -> Tensor:
    """Multiply ``x`` (..., in) by a reordered matrix, and add its bias."""
    return linear_of_reordered(x, *packed, "none", [], "")
