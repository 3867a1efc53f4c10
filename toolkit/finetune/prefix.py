"""Prefix tuning: learned keys and values that every token attends to in addition to those of its document.
The keys have no positions: they are learned in their form after RoPE.

PEFT implements a prefix as past keys and values. Here keys and values are parameters of the attention. Such
parameters work with activation checkpointing, do not shift positions, and precede every packed document.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.config.finetune import PrefixTuning
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import AttentionMask
from toolkit.models.common.decoder import Attention, Decoder


class Prefix(nn.Module):
    """Keys and values (K, P, E) of P learned tokens, sharded by head under tensor parallelism."""

    tensor_style = "adapter"
    tensor_placements = {"adapter": {"keys": "column", "values": "column"}}

    def __init__(self, args: ModelArgs, options: PrefixTuning):
        super().__init__()
        self.enabled = True
        shape = (args.n_kv_heads, options.num_virtual_tokens, args.head_dim)
        self.keys = nn.Parameter(torch.empty(shape))
        self.values = nn.Parameter(torch.empty(shape))

    def forward(
        self, attention: Attention, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask
    ) -> Tensor:
        if not self.enabled:
            return attention.backend(q_BSHE, k_BSKE, v_BSKE, mask)
        prefix = self.keys.transpose(0, 1), self.values.transpose(0, 1)
        backend: Any = attention.backend
        return backend(q_BSHE, k_BSKE, v_BSKE, mask, prefix=prefix)


def apply_prefix(model: Decoder, args: ModelArgs, options: PrefixTuning) -> None:
    """Add a prefix to every block of ``model``, on the meta device, in place."""
    with torch.device("meta"):
        for block in model.layers.values():
            attention: Any = block.attention
            attention.adapter = Prefix(args, options).to(attention.wo.weight.dtype)
