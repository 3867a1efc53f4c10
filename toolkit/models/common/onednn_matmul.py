"""Products of fp32 matrices on CPUs by oneDNN, in place of the MKL that torch multiplies them with.

MKL takes AVX2 on processors that are not Intel's, and half the rate of AVX-512 with it. torch has oneDNN for
other dtypes alone, but for its operator of inference, which is what multiplies here: its kernel takes the
place of those of ``aten::mm``, and of ``aten::addmm`` with a bias, for CPUs, below autograd, DTensor and
whatever else looks at operators, so that gradients and every layout have it too.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

_FEWEST = 1 << 20
"""Multiplications of a product from which on oneDNN is faster."""


def mkl_is_slow() -> bool:
    """Say if torch would multiply by MKL and this processor has AVX-512 that MKL does not take."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: say nothing rather than guess
        return False
    said = {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}
    foreign = said.get("vendor_id", ["GenuineIntel"]) != ["GenuineIntel"]
    return foreign and "avx512f" in said.get("flags", []) and torch.backends.mkl.is_available()


def multiply_by_onednn() -> torch.library.Library:
    """Have oneDNN multiply fp32 matrices of this process, for as long as the result is kept."""
    assert torch.backends.mkldnn.is_available()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verrid")
        library.impl("mm", _mm, "CPU", allow_override=True)
        library.impl("mm.out", _mm_out, "CPU", allow_override=True)
        library.impl("addmm", _addmm, "CPU", allow_override=True)
    return library


def _mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    if _takes(a_MK, b_KN):
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    return _mm_out(a_MK, b_KN, out=a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]))


def _mm_out(a_MK: Tensor, b_KN: Tensor, *, out: Tensor) -> Tensor:
    if _takes(a_MK, b_KN) and out.shape == (a_MK.shape[0], b_KN.shape[1]):
        return out.copy_(_mm(a_MK, b_KN))
    # As torch multiplies: beta = 0 does not read what is added.
    return torch.addmm(out, a_MK, b_KN, beta=0, out=out)


def _addmm(added: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    bias = added.shape == b_KN.shape[1:] and added.dtype == a_MK.dtype
    if bias and beta == alpha == 1 and _takes(a_MK, b_KN):
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), added, "none", [], "")
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    return torch.addmm(added, a_MK, b_KN, beta=beta, alpha=alpha, out=out)


def _takes(a_MK: Tensor, b_KN: Tensor) -> bool:
    (m, k), n = a_MK.shape, b_KN.shape[1]
    return a_MK.dtype == b_KN.dtype == torch.float32 and k == b_KN.shape[0] and m * k * n >= _FEWEST
