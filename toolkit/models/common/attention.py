"""Attention backends: each computes attention from queries, keys, values and a mask that it built itself.

Shapes: B batch, S sequence, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from toolkit.cpu.blockwise_attention import document_starts

AttentionMask = Any
"""The return value of a backend's ``mask``, built once per forward and passed to every block."""
Prefix = tuple[Tensor, Tensor]
"""Keys and values (P, K, E) that every query attends to in addition to its row; only SDPA supports this."""


class AttentionBackend:
    """softmax(q kᵀ / √E) v, causal and within documents; each KV head serves H / K query heads.

    With a ``window``, a query attends only to itself and the ``window`` - 1 tokens before it. If ``chunked``,
    documents are instead split into chunks of ``window`` tokens, and a query attends within its chunk. With
    ``takes_sinks``, ``sinks_H`` are logits, one per head, that join the denominator of the softmax. With
    ``takes_padding``, rows may begin with padding, as a separate document of any length, in any dtype. With
    ``takes_latents``, latent attention passes latent vectors as the keys and values of one head.
    """

    takes_sinks = False
    takes_padding = False
    takes_latents = False

    def __init__(self, window: int | None = None, chunked: bool = False):
        self.window, self.chunked = window, chunked and window is not None

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> AttentionMask:
        """Build the mask from document ids (B, S) with B = ``rows``; None means one document per row.

        The tokens of a document are contiguous. Keys are the first ``length`` tokens of S, and queries the
        tokens from ``first`` on; both are all S tokens unless sequences are sharded over ranks.
        """
        raise NotImplementedError

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask) -> Tensor:
        """Compute attention. Returns the shape of the queries."""
        raise NotImplementedError

    def reach(self, length: int) -> int | None:
        """Return the sliding window, or None if it is not shorter than ``length`` tokens."""
        return None if self.window is None or self.chunked or self.window >= length else self.window

    def within_chunks(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device
    ) -> Tensor | None:
        """Return ids (B, S) of the chunks in the first ``length`` tokens, which masks treat like documents;
        without chunks shorter than ``length``, return ``documents_BS``."""
        if self.window is None or not self.chunked or self.window >= length:
            return documents_BS
        places = torch.arange(length, device=device).expand(rows, -1)
        if documents_BS is not None:
            places = places - document_starts(documents_BS[:, :length])
        return (places % self.window == 0).cumsum(1)


_CLASSES = {
    "sdpa": "SDPA", "flash": "Flash", "flex": "FlexAttention", "varlen": "VarlenAttention",
    "blockwise": "Blockwise",
}  # fmt: skip


def attention_backend(name: str, window: int | None = None, chunked: bool = False) -> AttentionBackend:
    """Return the backend ``name``, imported on demand because two backends import torch's compiler."""
    return getattr(import_module(f"{__package__}.attention_{name}"), _CLASSES[name])(window, chunked)
