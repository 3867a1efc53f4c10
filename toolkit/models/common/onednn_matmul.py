"""Products of fp32 matrices on CPUs by oneDNN, in place of the MKL that torch multiplies them with.

MKL takes AVX2 on processors that are not Intel's, and half the rate of AVX-512 with it. torch has oneDNN for
other dtypes alone, but for its operator of inference, which is what multiplies here: its kernel takes the
place of those of ``aten::mm``, and of ``aten::addmm`` with a bias, for CPUs, below autograd, DTensor and
whatever else looks at operators, so that gradients and every layout have it too.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from toolkit.cpu import processor
from toolkit.errors import DeviceError, Problem

_FEWEST = 1 << 20
"""Multiplications of a product from which on oneDNN is faster."""
_torchs_kernel = cache(torch.library.get_kernel)  # later ours may be there, which ends with its library


def mkl_is_slow() -> bool:
    """Say if torch would multiply by MKL, this processor has AVX-512 that MKL does not take, and oneDNN is
    there to take it."""
    said = processor()
    foreign = said.get("vendor_id", ["GenuineIntel"]) != ["GenuineIntel"]
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return foreign and "avx512f" in said.get("flags", []) and both


@cache
def _has_half_units() -> bool:
    """Say if this is AMD's Zen 4, which takes AVX-512 in two halves: MKL's rate is nearly oneDNN's there, and
    above it where that transposes the first factor."""
    said = processor()
    return said.get("vendor_id") == ["AuthenticAMD"] and said.get("cpu family") == ["25"]


def multiply_by_onednn() -> torch.library.Library:
    """Have oneDNN multiply fp32 matrices of this process, for as long as the result is kept.

    Raises:
        DeviceError: this torch was built without oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        rule = "this torch was built without oneDNN"
        raise DeviceError(Problem(rule, "leave it out, or install another build", "model.matmul", "onednn"))
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verrid")
        for name in ("mm", "mm.out", "addmm", "addmm.out"):
            kernel = partial(_multiply, _torchs_kernel(f"aten::{name}", "CPU"))
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library


def _multiply(torchs: Any, keys: Any, *matrices: Tensor, **options: Any) -> Tensor:
    """Multiply the last two of ``matrices`` and add the first of three; ``torchs`` does the rest."""
    *added, a_MK, b_KN = matrices
    out, scales = options.get("out"), (options.get("alpha", 1), options.get("beta", 1))
    plain = scales == (1, 1) and all(it.shape == b_KN.shape[1:] and it.dtype == a_MK.dtype for it in added)
    if not (plain and _takes(a_MK, b_KN) and (out is None or out.shape == (len(a_MK), b_KN.shape[1]))):
        return torchs.call_boxed(keys, *matrices, **options)
    bias_N = added[0] if added else None
    product = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), bias_N, "none", [], "")
    return product if out is None else out.copy_(product)


def _takes(a_MK: Tensor, b_KN: Tensor) -> bool:
    if a_MK.dtype != torch.float32 or b_KN.dtype != torch.float32 or a_MK.ndim != 2 or b_KN.ndim != 2:
        return False
    (m, k), n = a_MK.shape, b_KN.shape[1]
    slow = a_MK.stride(0) < a_MK.stride(1) and _has_half_units()
    return k == b_KN.shape[0] and m * k * n >= _FEWEST and not slow
