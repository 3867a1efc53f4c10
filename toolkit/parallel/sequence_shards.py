"""Sharding of sequences over context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShards:
    """Assignment of a sequence's chunks to ``size`` ranks, as seen by ``rank``."""

    rank: int
    size: int
    balanced: bool = True

    @property
    def chunks(self) -> int:
        """Number of chunks per sequence; it must divide the sequence length."""
        return self.size * 2 if self.balanced else self.size

    def of(self, rank: int) -> list[int]:
        """Return the chunks of ``rank``, in ascending order."""
        return [rank, 2 * self.size - 1 - rank] if self.balanced else [rank]

    def shard(self, x_BS: Tensor) -> Tensor:
        """Return this rank's columns of ``x_BS``, in ascending order."""
        chunks = x_BS.chunk(self.chunks, dim=1)
        return torch.cat([chunks[index] for index in self.of(self.rank)], dim=1)

    def unshard(self, gathered: Tensor) -> Tensor:
        """Return sequences (B, S, …) from the ranks' shards, stacked as (size·B, S/size, …)."""
        order = [index for rank in range(self.size) for index in self.of(rank)]
        chunks = [
            chunk
            for shard in gathered.chunk(self.size)
            for chunk in shard.chunk(len(order) // self.size, dim=1)
        ]
        return torch.cat([chunks[order.index(index)] for index in range(self.chunks)], dim=1)
