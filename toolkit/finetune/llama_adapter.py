"""LLaMA-Adapter: learned prompts in the last blocks, added through gates that start at zero, so that training
starts with the unchanged model (Zhang et al. 2023, arXiv:2303.16199).

The block's projections compute a prompt's keys and values, without RoPE. The prompt's softmax is separate
from the tokens' softmax. The prompt's result is added before the output projection, multiplied by tanh of a
gate per head (as in the paper), or by one plain gate (as in PEFT).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.config.finetune import LlamaAdapter
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import AttentionMask
from toolkit.models.common.attention_sdpa import scaled_dot_product
from toolkit.models.common.decoder import Attention, Decoder


class GatedPrompt(nn.Module):
    """A ``prompt`` (P, D) and a ``gate``, per head (H,) or shared (1,)."""

    tensor_style = "adapter"

    def __init__(self, args: ModelArgs, options: LlamaAdapter):
        super().__init__()
        self.enabled = True
        self.by_head = options.gate == "head"
        self.prompt = nn.Parameter(torch.empty(options.adapter_len, args.dim))
        self.gate = nn.Parameter(torch.empty(args.n_heads if self.by_head else 1))
        gate = "column" if self.by_head else "whole"
        self.tensor_placements = {"adapter": {"prompt": "whole", "gate": gate}}

    def forward(
        self, attention: Attention, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask
    ) -> Tensor:
        if not self.enabled:
            return attention.backend(q_BSHE, k_BSKE, v_BSKE, mask)
        keys_PKE = attention.wk(self.prompt).unflatten(-1, (-1, attention.head_dim))
        values_PKE = attention.wv(self.prompt).unflatten(-1, (-1, attention.head_dim))
        if attention.k_norm is not None:
            keys_PKE = attention.k_norm(keys_PKE)
        out_BHSE = scaled_dot_product(
            q_BSHE.transpose(1, 2), _heads(keys_PKE, q_BSHE), _heads(values_PKE, q_BSHE), None
        )
        gate = self.gate.tanh()[:, None] if self.by_head else self.gate
        return attention.backend(q_BSHE, k_BSKE, v_BSKE, mask) + gate * out_BHSE.transpose(1, 2)


def _heads(x_PKE: Tensor, q_BSHE: Tensor) -> Tensor:
    """Expand to all samples and query heads, (B, H, P, E)."""
    group = q_BSHE.shape[2] // x_PKE.shape[1]
    x_HPE = x_PKE.transpose(0, 1).repeat_interleave(group, dim=0)
    return x_HPE.expand(q_BSHE.shape[0], -1, -1, -1)


def apply_llama_adapter(
    model: Decoder, layers: Collection[int], args: ModelArgs, options: LlamaAdapter
) -> None:
    """Add prompts to the blocks ``layers`` of ``model``, on the meta device, in place."""
    with torch.device("meta"):
        for name, block in model.layers.items():
            if int(name) in layers:
                attention: Any = block.attention
                attention.adapter = GatedPrompt(args, options).to(attention.wo.weight.dtype)
