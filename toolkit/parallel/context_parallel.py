"""Context parallelism: each sequence split over ranks; only attention needs the others' part of it.

Every rank computes the queries of its tokens and gathers the keys and values of all (the method of
arXiv:2407.21783, section 3.3.2): with grouped heads they are small, and a mask of any kind is
a mask of rows. A sequence is cut into 2·cp pieces, of which rank r takes the r-th and the r-th from the end,
so that the work of causal attention, which grows with the position, is the same on all. Without balancing
there are cp pieces, and rank r takes the r-th.

A block gathers once in its forward and scatters once in its backward. Without activation checkpointing the
gathered keys and values, 2·S·K·E numbers a sample and block, are kept for backward; with it, its forward
gathers them again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from toolkit.models.common.attention import AttentionBackend, AttentionMask, Prefix
from toolkit.models.common.decoder import Attention, Decoder
from toolkit.parallel.autograd_collectives import gather
from toolkit.parallel.ring_attention import RingAttention
from toolkit.parallel.sequence_shards import SequenceShards


class ContextParallelAttention(AttentionBackend):
    """A back end's attention of this rank's queries to the keys and values of all ranks.

    A piece of queries sees no key after its own end, so that each is computed with just the keys until
    then.
    """

    def __init__(self, inner: AttentionBackend, shards: SequenceShards, mesh: DeviceMesh):
        self.inner = inner
        self.shards = shards
        self.group = mesh.get_group()

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> list[AttentionMask]:
        """``documents_BS`` are of whole sequences, ``length`` this rank's tokens of one."""
        assert first == 0, "which queries these are is what the shards say"
        pieces = self.shards.of(self.shards.rank)
        size = length // len(pieces)
        return [
            self.inner.mask(documents_BS, rows, (piece + 1) * size, device, first=piece * size)
            for piece in pieces
        ]

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        mask: AttentionMask,
        prefix: Prefix | None = None,
    ) -> Tensor:
        heads = k_BSKE.shape[2]
        both = self.shards.whole(gather(torch.cat([k_BSKE, v_BSKE], dim=2), 0, self.group))
        k_BSKE, v_BSKE = both.split(heads, dim=2)
        pieces = self.shards.of(self.shards.rank)
        size = q_BSHE.shape[1] // len(pieces)
        plain: Any = self.inner
        inner = plain if prefix is None else partial(plain, prefix=prefix)
        outputs = [
            inner(q, k_BSKE[:, : (piece + 1) * size], v_BSKE[:, : (piece + 1) * size], its_mask)
            for piece, q, its_mask in zip(pieces, q_BSHE.split(size, dim=1), mask, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def apply_context_parallel(
    model: Decoder, shards: SequenceShards, mesh: DeviceMesh, *, ring: bool = False
) -> None:
    """Give every block of ``model`` the attention of split sequences, in place; with ``ring`` keys and values
    travel, in place of being gathered."""
    if ring:
        model.attention = RingAttention(shards, mesh, model.attention.window)
    else:
        model.attention = ContextParallelAttention(model.attention, shards, mesh)
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = model.attention
