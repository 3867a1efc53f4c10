"""The part of a sequence that a rank of context parallelism has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShards:
    """Which tokens of a sequence the ``rank``-th of ``size`` ranks has."""

    rank: int
    size: int
    balanced: bool = True

    @property
    def pieces(self) -> int:
        """Pieces of a sequence; its length must divide by it."""
        return self.size * 2 if self.balanced else self.size

    def of(self, rank: int) -> list[int]:
        """The pieces of ``rank``, in ascending order."""
        return [rank, 2 * self.size - 1 - rank] if self.balanced else [rank]

    def cut(self, x_BS: Tensor) -> Tensor:
        """This rank's columns of ``x_BS``, in ascending order."""
        parts = x_BS.chunk(self.pieces, dim=1)
        return torch.cat([parts[piece] for piece in self.of(self.rank)], dim=1)

    def whole(self, gathered: Tensor) -> Tensor:
        """Sequences (B, S, …) from what :meth:`cut` gives each rank, stacked as (size·B, S/size, …)."""
        held = [piece for rank in range(self.size) for piece in self.of(rank)]
        parts = [
            part for cut in gathered.chunk(self.size) for part in cut.chunk(len(held) // self.size, dim=1)
        ]
        return torch.cat([parts[held.index(piece)] for piece in range(self.pieces)], dim=1)
