"""Context parallelism: each sequence is sharded over ranks; only attention communicates.

Every rank computes the queries of its tokens and all-gathers keys and values (the method of arXiv:2407.21783,
section 3.3.2). With grouped heads these are small, and any mask works. The work of causal attention grows
with the position. Each sequence is therefore split into 2·cp chunks, and rank r takes the r-th chunk from the
start and the r-th from the end. Without load balancing there are cp chunks, and rank r takes the r-th.

Each block runs one all-gather in forward and one reduce-scatter in backward. Without activation
checkpointing, the gathered keys and values (2·S·K·E elements per sample and block) are saved for backward;
with it, the recomputed forward gathers them again.
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
    """Attention of this rank's queries to the keys and values of all ranks, computed by another backend.

    Each chunk of queries attends to the keys up to its own end.
    """

    def __init__(self, inner: AttentionBackend, shards: SequenceShards, mesh: DeviceMesh):
        super().__init__(inner.window, inner.chunked)
        self.inner = inner
        self.takes_sinks = inner.takes_sinks
        self.shards = shards
        self.group = mesh.get_group()

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> list[AttentionMask]:
        """Build one mask per chunk. ``documents_BS`` covers full sequences; ``length`` counts this rank's
        tokens."""
        assert first == 0, "the shards determine the first query"
        chunks = self.shards.of(self.shards.rank)
        size = length // len(chunks)
        return [
            self.inner.mask(documents_BS, rows, (chunk + 1) * size, device, first=chunk * size)
            for chunk in chunks
        ]

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        mask: AttentionMask,
        prefix: Prefix | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        heads = k_BSKE.shape[2]
        both = self.shards.unshard(gather(torch.cat([k_BSKE, v_BSKE], dim=2), 0, self.group))
        k_BSKE, v_BSKE = both.split(heads, dim=2)
        chunks = self.shards.of(self.shards.rank)
        size = q_BSHE.shape[1] // len(chunks)
        options = {"prefix": prefix, "sinks_H": sinks_H}
        plain: Any = self.inner
        inner = partial(plain, **{name: it for name, it in options.items() if it is not None})
        outputs = [
            inner(q, k_BSKE[:, : (chunk + 1) * size], v_BSKE[:, : (chunk + 1) * size], chunk_mask)
            for chunk, q, chunk_mask in zip(chunks, q_BSHE.split(size, dim=1), mask, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def apply_context_parallel(
    model: Decoder, shards: SequenceShards, mesh: DeviceMesh, *, ring: bool = False
) -> None:
    """Make the attention backend of every block context-parallel, in place; ``ring`` selects ring attention
    instead of all-gathers."""
    model.backends = {
        window: RingAttention(shards, mesh, window, inner.chunked)
        if ring
        else ContextParallelAttention(inner, shards, mesh)
        for window, inner in model.backends.items()
    }
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = model.backends[module.backend.window]
