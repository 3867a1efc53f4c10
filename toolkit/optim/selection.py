"""Selection of parameters by optimizers, independent of the mesh: for Muon, and for 8-bit moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Elements of a row that share a scale."""
_MIN_ELEMENTS = 4096
"""Minimum size of a matrix: smaller ones save too little memory; same as in torchao and bitsandbytes."""


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: weights of the blocks' linear layers, and of their routers, as
    in Moonlight's recipe (arXiv:2502.16982); experts are stacked."""
    return name.startswith("layers.") and name.endswith(".weight") and len(shape) == 2


def in_8bit(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape has 8-bit moments."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and math.prod(shape) >= _MIN_ELEMENTS
