"""Attention back ends: each takes queries, keys, values and the mask that it made itself.

Shapes: B batch, S sequence, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionMask = Any
"""What a back end's own ``mask`` returns, made once a forward and handed to every block."""


class AttentionBackend(Protocol):
    """softmax(q kᵀ / √E) v, causal and within documents, each key head serving H / K query heads."""

    def mask(self, documents_BS: Tensor | None) -> AttentionMask:
        """What attention may see: documents (B, S) of equal ids, or one document a row for None."""

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask) -> Tensor:
        """Returns (B, S, H, E)."""


def attention_backend(name: str) -> AttentionBackend:
    """The back end called "sdpa"."""
    return {"sdpa": SDPA}[name]()


class SDPA:
    """torch's scaled_dot_product_attention: every device, with a dense mask where there are documents."""

    def mask(self, documents_BS: Tensor | None) -> Tensor | None:
        return attention_mask(documents_BS)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa(q_BSHE, k_BSKE, v_BSKE, mask)


def attention_mask(documents_BS: Tensor | None) -> Tensor | None:
    """Causal attention within documents: tokens of one document have one id, whatever it is.

    Padding has an id of its own: it sees itself, so that no row of the softmax is empty.
    """
    if documents_BS is None:
        return None
    same_B1SS = documents_BS[:, None, :, None] == documents_BS[:, None, None, :]
    return same_B1SS.tril_()


def sdpa(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √E) v over what the mask allows, with each key head serving H / K query heads.

    Returns (B, S, H, E).
    """
    q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
    group = q_BHSE.shape[1] // k_BKSE.shape[1]
    # On CUDA no fused kernel takes both a mask and grouped heads; the fallback keeps all S x S scores.
    grouped = group > 1 and (mask is None or not q_BHSE.is_cuda)
    if group > 1 and not grouped:
        k_BKSE, v_BKSE = (torch.repeat_interleave(x, group, dim=1) for x in (k_BKSE, v_BKSE))
    out_BHSE = F.scaled_dot_product_attention(
        q_BHSE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )
    return out_BHSE.transpose(1, 2)
