"""Attention back ends: each takes queries, keys, values and the mask that it made itself.

Shapes: B batch, S sequence, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

AttentionMask = Any
"""The return value of a back end's own ``mask``, made once a forward and handed to every block."""
Prefix = tuple[Tensor, Tensor]
"""Keys and values (P, K, E) that every query sees beside those of its row: SDPA takes them."""


class AttentionBackend:
    """softmax(q kᵀ / √E) v, causal and within documents, each key head serving H / K query heads.

    With a ``window`` a query sees itself and the ``window`` - 1 tokens before it, no others.
    ``takes_padding`` says if rows may begin with padding as a document, at any length and dtype.
    """

    takes_padding = False

    def __init__(self, window: int | None = None):
        self.window = window

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> AttentionMask:
        """Build the mask that keeps to documents (B, S) of equal ids, or to one document a row for None.

        The tokens of a document lie next to one another. B is ``rows``. Keys are those of the first
        ``length`` tokens of S, queries those from ``first`` on: all S of both, unless the sequence is
        split over ranks.
        """
        raise NotImplementedError

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask) -> Tensor:
        """Returns the shape of the queries."""
        raise NotImplementedError

    def reach(self, length: int) -> int | None:
        """The window, or None where it hides nothing among ``length`` tokens."""
        return self.window if self.window is not None and self.window < length else None


_CLASSES = {
    "sdpa": "SDPA", "flash": "Flash", "flex": "FlexAttention", "varlen": "VarlenAttention",
    "blockwise": "Blockwise",
}  # fmt: skip


def attention_backend(name: str, window: int | None = None) -> AttentionBackend:
    """The back end called "sdpa" or so, whose file is loaded now: two of them import torch's compiler."""
    return getattr(import_module(f"{__package__}.attention_{name}"), _CLASSES[name])(window)
