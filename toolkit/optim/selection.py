"""Selection of parameters for Muon and for 8-bit moments, independent of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.config.optimizer import Optimizer
from toolkit.optim.groups import by_adamw

BLOCK = 256
"""Elements of a row that share a scale."""
_MIN_ELEMENTS = 4096
"""Minimum size of a matrix: smaller ones save too little memory; same as in torchao and bitsandbytes."""
_EXPERTS = (".experts.w1", ".experts.w2", ".experts.w3")


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: weights of the blocks' linear layers, routers and experts,
    which are stacked, as in Moonlight's recipe (arXiv:2502.16982)."""
    ends, dims = (_EXPERTS, 3) if ".experts." in name else (".weight", 2)
    return name.startswith("layers.") and name.endswith(ends) and len(shape) == dims


def in_8bit(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape has 8-bit moments."""
    return len(shape) == 2 and shape[1] % BLOCK == 0 and math.prod(shape) >= _MIN_ELEMENTS


def beyond_adamw(name: str, shape: Sequence[int], options: Optimizer) -> bool:
    """Return whether Muon updates a parameter, or AdamW8bit stores its moments in 8 bits: the parameters of a
    run with these optimizers that differ from one with AdamW."""
    kinds = {"Muon": is_block_matrix(name, shape), "AdamW8bit": in_8bit(shape)}
    return kinds.get(options.name, False) and not by_adamw(name, options)
