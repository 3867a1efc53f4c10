"""Tensors in blocks of rows, so that none need be in memory whole, and threads that fill them. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from toolkit.hardware import cores
from toolkit.launcher.environment import whole_number

BLOCKS_BYTES = 1 << 30
"""Memory for the blocks that threads have in flight, whatever the number of cores."""
_COPIES = 4  # of a block, at most: as it is read, cast, put in order, written


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


def threads() -> int:
    """This process's share of the cores, to fill its parts with; torch's own thread count is 1 under
    torchrun."""
    processes = whole_number(os.environ, "LOCAL_WORLD_SIZE", 1, 1)
    return max(1, cores() // processes)


def block_threads(block_bytes: int) -> int:
    """Threads that may each have a block of so many bytes in flight, within ``BLOCKS_BYTES`` together."""
    return max(1, min(threads(), BLOCKS_BYTES // (_COPIES * block_bytes)))
