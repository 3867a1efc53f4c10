"""Read experts from Hugging Face tensors that fuse them, in plain dtypes or in MXFP4.

:class:`~toolkit.models.common.parameter_table.Fused` is the layout. If elements of two parameters alternate,
reading one reads the bytes of both. In MXFP4 (OCP Microscaling Formats 1.0), rows are those of our weights.
Each element has 4 bits, and 32 elements of a row share a scale, a power of two. Two elements share a byte,
the first in its low half.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.io.tensor_file import Region, TensorPlace, read_region
from toolkit.models.common.parameter_table import Fused
from toolkit.weights.safetensors_header import FP4_BLOCK

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LEVELS = torch.cat([_E2M1, -_E2M1])
_EXPONENT_BIAS = 127


def read_fused(
    place: TensorPlace, scales: TensorPlace | None, fused: Fused, size: int, region: Region, out: Tensor
) -> None:
    """Read a ``region`` of a parameter (E, N) or (E, N, K) into ``out``, expert by expert. ``place`` is the
    tensor (E, N · count) or (E, K, N · count), with N = ``size``; with ``scales`` (E, N · count, K / 32), it
    is in MXFP4.

    Raises:
        DataError: a file cannot be read or ends too early.
    """
    experts, rows, *columns = region
    own = fused.columns(size, rows)
    span = slice(own.start, own.stop)
    for expert, target in zip(range(experts.start, experts.stop), out, strict=True):
        if scales is None:
            stored = _read(_of_expert(place, expert), (*columns, span))
            target.copy_(stored[..., :: own.step].movedim(-1, 0))
        else:
            bytes_NK = replace(place, shape=(*scales.shape[:2], scales.shape[2] * FP4_BLOCK // 2))
            places = _of_expert(bytes_NK, expert), _of_expert(scales, expert)
            target.copy_(_read_fp4(*places, span, columns[0])[:: own.step])


def _of_expert(place: TensorPlace, expert: int) -> TensorPlace:
    size = math.prod(place.shape[1:]) * place.dtype.itemsize
    return replace(place, begin=place.begin + expert * size, shape=place.shape[1:])


def _read(place: TensorPlace, region: Region) -> Tensor:
    return read_region(place, region, torch.empty([it.stop - it.start for it in region], dtype=place.dtype))


def _read_fp4(place: TensorPlace, scales: TensorPlace, rows: slice, columns: slice) -> Tensor:
    """Return a region of a matrix (N, K) in fp32."""
    groups = slice(columns.start // FP4_BLOCK, -(-columns.stop // FP4_BLOCK))
    width = FP4_BLOCK // 2
    pairs_NK = _read(place, (rows, slice(groups.start * width, groups.stop * width)))
    levels_NK = _LEVELS[torch.stack([pairs_NK & 15, pairs_NK >> 4], dim=-1).flatten(1).int()]
    exponents_NG = _read(scales, (rows, groups)).int() - _EXPONENT_BIAS
    values_NGE = torch.ldexp(levels_NK.unflatten(1, (-1, FP4_BLOCK)), exponents_NG[..., None])
    first = groups.start * FP4_BLOCK
    return values_NGE.flatten(1)[:, columns.start - first : columns.stop - first]
