"""Tensors in blocks of rows, so that none need be in memory whole. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def row_blocks(shape: Sequence[int], itemsize: int, *, limit: int, multiple: int = 1) -> Iterator[slice]:
    """Rows of a tensor in blocks of at most ``limit`` bytes, each but the last a ``multiple`` of rows.

    A row, or ``multiple`` of them, that is larger makes a block of its own.
    """
    row = itemsize * math.prod(shape[1:])
    step = max(1, limit // max(1, row * multiple)) * multiple
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def rows_of(rows: slice, shape: Sequence[int]) -> tuple[slice, ...]:
    """The region of all columns of ``rows``."""
    return (rows, *(slice(0, size) for size in shape[1:]))
