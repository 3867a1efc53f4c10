"""A family as a package of one's own would add it: a Llama whose blocks gate what attention adds.

Each block has one more parameter, a buffer, a loss of its own (it keeps the gate's logits small) and a
statistic (how open the gate is).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.extensions import register_family
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.parameter_table import INPUT, ONES, Init, ParameterRow, block_rows
from toolkit.models.common.spec import ModelSpec
from toolkit.models.registry import resolve


class Gated(ModelSpec):
    def decoder(self) -> type:
        import torch
        from torch import Tensor, nn

        from toolkit.models.common.block_output import BlockOutput
        from toolkit.models.common.decoder import Decoder, TransformerBlock

        class Gate(nn.Module):
            def __init__(self, dim: int):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(dim))
                self.register_buffer("temperature", torch.empty(1))

            def forward(self, h_BSD: Tensor) -> Tensor:
                return (h_BSD * self.weight).sum(-1, keepdim=True) * self.temperature.to(h_BSD.dtype)

        class GatedBlock(TransformerBlock):
            def __init__(self, args: ModelArgs, attention: Any):
                super().__init__(args, attention)
                self.gate = Gate(args.dim)

            def forward(self, h_BSD: Tensor, rotations: Tensor, mask: Any) -> BlockOutput:
                logits_BS1 = self.gate(h_BSD)
                opened_BS1 = 2 * torch.sigmoid(logits_BS1)
                h_BSD = h_BSD + opened_BS1 * self.attention(self.attention_norm(h_BSD), rotations, mask)
                h_BSD = h_BSD + self.feed_forward(self.ffn_norm(h_BSD))
                wide = torch.promote_types(logits_BS1.dtype, torch.float32)
                losses = {"gate_loss": 0.01 * logits_BS1.to(wide).square().sum()}
                return BlockOutput(h_BSD, losses, {"gate_open": opened_BS1.to(wide).sum()})

        class GatedDecoder(Decoder):
            def __init__(self, args: ModelArgs, **options: Any):
                super().__init__(args, **options)
                for name in self.layers:
                    self.layers[name] = GatedBlock(args, self.backends[args.window(int(name))])

        return GatedDecoder

    def block(self, args: ModelArgs, layer: int) -> list[ParameterRow]:
        gate = ParameterRow("gate.weight", (args.dim,), Init(std=0.3), "gate.weight", reads=(INPUT,))
        temperature = ParameterRow(
            "gate.temperature", (1,), replace(ONES, mean=0.5), "gate.temperature", buffer=True
        )
        return [*block_rows(args, layer), gate, temperature]

    def metric_names(self, args: ModelArgs) -> Sequence[str]:
        return "gate_loss", "gate_open"

    def hf_config(self) -> HFConfig:
        return HFConfig("gated_llama", "GatedLlamaForCausalLM", "a gated Llama", 2048)


_SIZE = replace(resolve("llama3.1", "debugmodel"), rope_scaling=None, family="gated")
register_family("gated", Gated({"gated": {"debugmodel": _SIZE}}))
