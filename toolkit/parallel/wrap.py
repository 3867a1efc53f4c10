"""Other FSDP units than a model's own: modules of some classes, or of some size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Wrapping:
    """``policy`` "class": each module of ``classes``; "size": each with ``min_params`` parameters that
    are in no smaller unit."""

    policy: str
    classes: tuple[str, ...] = ()
    min_params: int = 100_000_000


def wrapped_units(model: nn.Module, wrapping: Wrapping) -> list[list[nn.Module]]:
    """Units of one module each, in forward order; a module inside another comes after it."""
    raise NotImplementedError
