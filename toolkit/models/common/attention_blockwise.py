"""Blockwise attention for CPUs as a backend; toolkit/cpu/blockwise_attention.py computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.cpu.blockwise_attention import attend, document_starts
from toolkit.models.common.attention import AttentionBackend


class Blockwise(AttentionBackend):
    """Attention in blocks of queries, for CPUs: any dtype, grouped heads, documents, windows."""

    takes_padding = takes_sinks = True

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        """Return the index (B, Q) of the first key visible to each query, given documents and window; None if
        it is always the first of the row."""
        documents_BS = self.within_chunks(documents_BS, rows, length, device)
        starts_BQ = None if documents_BS is None else document_starts(documents_BS[:, :length])[:, first:]
        if (window := self.reach(length)) is None:
            return starts_BQ
        window_Q = torch.arange(first, length, device=device).sub_(window - 1).clamp_(min=0)
        return window_Q.expand(rows, -1) if starts_BQ is None else starts_BQ.maximum(window_Q)

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        mask: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        return attend(q_BSHE, k_BSKE, v_BSKE, mask, sinks_H)
