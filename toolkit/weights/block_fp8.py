"""Dequantize matrices stored in fp8 (e4m3) with one scale per block of 128 × 128 elements
(arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.io.tensor_file import BUFFER_BYTES, Region, TensorPlace, read_region
from toolkit.weights.safetensors_header import FP8_BLOCK

DEQUANTIZED = torch.bfloat16
"""Dtype in which such matrices are read: that of the published models."""


def read_block_fp8(place: TensorPlace, scales: TensorPlace, region: Region, out: Tensor) -> Tensor:
    """Read a ``region`` (rows, columns) of the matrix at ``place``, multiplied by its ``scales`` (N / 128,
    K / 128, rounded up), into ``out`` of any dtype, and return it. Products are computed in fp32, in buffers
    of a few rows.

    Raises:
        DataError: a file cannot be read or ends too early.
    """
    rows, columns = region
    if not out.numel():
        return out
    block_columns = _blocks(columns)
    of_column = torch.arange(columns.start, columns.stop) // FP8_BLOCK - block_columns.start
    width = columns.stop - columns.start
    step = max(1, BUFFER_BYTES // (4 * width))
    for start in range(rows.start, rows.stop, step):
        part = slice(start, min(start + step, rows.stop))
        block_rows = _blocks(part)
        shape = block_rows.stop - block_rows.start, block_columns.stop - block_columns.start
        scale = read_region(scales, (block_rows, block_columns), torch.empty(shape, dtype=scales.dtype))
        of_row = torch.arange(part.start, part.stop) // FP8_BLOCK - block_rows.start
        stored = torch.empty((part.stop - part.start, width), dtype=place.dtype)
        values = read_region(place, (part, columns), stored).float()
        values *= scale.float()[of_row][:, of_column]
        out[part.start - rows.start : part.stop - rows.start].copy_(values)
    return out


def _blocks(elements: slice) -> slice:
    """Return the blocks that a range of rows or columns intersects."""
    return slice(elements.start // FP8_BLOCK, -(-elements.stop // FP8_BLOCK))
