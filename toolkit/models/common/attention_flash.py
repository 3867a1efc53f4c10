"""torch's scaled_dot_product_attention, restricted to the flash kernel. CUDA only.

Shapes: B batch, S sequence, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from toolkit.models.common.attention import AttentionBackend
from toolkit.models.common.attention_sdpa import causal_mask, sdpa


class Flash(AttentionBackend):
    """``SDPA`` restricted to the flash kernel, which supports no masks; raises an error where torch would use
    another."""

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        documents_BS = self.within_chunks(documents_BS, rows, length, device)
        if documents_BS is not None:
            raise ValueError("the flash kernel supports no mask: documents would attend to one another")
        if self.reach(length):
            raise ValueError("the flash kernel supports no mask: tokens would attend beyond their window")
        return causal_mask(length, device, first)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa(q_BSHE, k_BSKE, v_BSKE, mask, [SDPBackend.FLASH_ATTENTION])
