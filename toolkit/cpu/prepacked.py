"""Weight matrices prepacked in the layout of the CPU's matmul kernel, instead of row-major.

oneDNN reorders a bf16 matrix in every call, which takes as long as the matmul if there are few input rows. In
fp32, torch uses another library's matmul, which is slower on some CPUs. With matrices that are reordered
once, a matmul takes about half the time in either dtype (benchmarks/LOG.md). The operators are those that
torch's compiler uses for frozen weights on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit import cpu
from toolkit.compat import linear_of_reordered, onednn_has_bf16, reorder_linear_weight

_ROWS = 8
"""Number of input rows for which the layout is chosen; other numbers work too."""
Packed = tuple[Tensor, Tensor | None]
"""A reordered matrix, and its bias if there is one."""


def takes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports reordered matrices of ``dtype`` here: fp32, and bf16 if the CPU has
    instructions for it."""
    return (
        cpu.is_enabled()
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and onednn_has_bf16()))
    )


def reordered(weight: Tensor) -> Tensor:
    """Copy a matrix (out, in) into the prepacked layout."""
    return reorder_linear_weight(weight.detach(), _ROWS)


def joined(*linears: nn.Linear) -> Packed:
    """Concatenate weights and biases of layers with the same input into one reordered matrix and one bias."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    packed = reordered(torch.cat([linear.weight for linear in linears]))
    return packed, torch.cat(biases) if biases else None


def multiply(x: Tensor, packed: Packed) -> Tensor:
    """Multiply ``x`` (..., in) by a reordered matrix, and add its bias."""
    return linear_of_reordered(x, *packed, "none", [], "")
