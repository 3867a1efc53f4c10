"""The flash kernel of CUDA and nothing else, behind torch's scaled_dot_product_attention.

Shapes: B batch, S sequence, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from toolkit.models.common.attention import AttentionBackend
from toolkit.models.common.attention_sdpa import causal_mask, sdpa


class Flash(AttentionBackend):
    """``SDPA`` that raises where torch would take another kernel than flash, which has no masks."""

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        if documents_BS is not None:
            raise ValueError("the flash kernel takes no mask, so that documents would see one another")
        if self.reach(length):
            raise ValueError("the flash kernel takes no mask, so that tokens would see beyond their window")
        return causal_mask(length, device, first)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa(q_BSHE, k_BSKE, v_BSKE, mask, [SDPBackend.FLASH_ATTENTION])
