"""Selection of parameters with 8-bit moments, independent of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Elements of a row that share a scale."""
_MIN_ELEMENTS = 4096
"""Minimum size of a matrix: smaller ones save too little memory; same as in torchao and bitsandbytes."""


def in_8bit(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape has 8-bit moments."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and math.prod(shape) >= _MIN_ELEMENTS
