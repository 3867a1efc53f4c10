"""Which moments have 8 bits: a question of the parameter alone, whatever it is split over."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Numbers of a row that share a magnitude."""
_SMALLEST = 4096
"""Numbers of a matrix below which 8 bits would save too little, as in the libraries."""


def in_8bit(shape: Sequence[int]) -> bool:
    """Say if moments of a parameter of this shape have 8 bits."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and math.prod(shape) >= _SMALLEST
