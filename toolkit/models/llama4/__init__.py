"""The text models of Llama 4: blocks with chunked attention and RoPE, every fourth with full attention and no
RoPE, and one expert per token next to a shared one (https://ai.meta.com/blog/llama-4-multimodal-intelligence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import Fused, ParameterRow, block_rows
from toolkit.models.common.spec import ModelSpec
from toolkit.models.llama4.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub

_FUSED = {
    "w1": ("gate_up_proj", Fused(0, 2, peft_swaps=True)),
    "w2": ("down_proj", Fused(peft_swaps=True)),
    "w3": ("gate_up_proj", Fused(1, 2, peft_swaps=True)),
}
_NAMES = {"mlp.gate.": "router.", "mlp.shared_experts.": "shared_expert.", "mlp.": ""}


class _Llama4(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.llama4.hf_config import Llama4Config

        return Llama4Config(
            "llama4_text", "Llama4ForCausalLM", "a Llama4", 131072, head_dim=128, n_kv_heads=8,
            norm_eps=1e-5, rope_theta=500000.0, multimodal_type="llama4", classifies=False,
            extra={"router_jitter_noise": 0.0},
        )  # fmt: skip

    def block(self, args: ModelArgs, layer: int) -> Sequence[ParameterRow]:
        return [_published(row) for row in block_rows(args, layer)]

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        sizes = {"Llama-4-Scout-17B-16E": "17B-16E", "Llama-4-Maverick-17B-128E": "17B-128E"}
        names = {f"{name}{end}": ("llama4", it) for name, it in sizes.items() for end in ("", "-Instruct")}
        return Hub("meta-llama", names, gated=True)


def _published(row: ParameterRow) -> ParameterRow:
    """Return the row with its name and layout in published files, where RoPE rotates adjacent rows. LoRA does
    not apply to the router, whose layer in transformers also returns scores."""
    if row.experts:
        name, fused = _FUSED[row.name.rpartition(".")[2]]
        return replace(row, hf=f"feed_forward.experts.{name}", fused=fused)
    prefix = next((prefix for prefix in _NAMES if row.hf.startswith(prefix)), "")
    hf = f"feed_forward.{_NAMES[prefix]}{row.hf.removeprefix(prefix)}" if prefix else row.hf
    return replace(row, hf=hf, rotary=0, router=False)


SPEC = _Llama4(PRESETS)
