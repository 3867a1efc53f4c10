"""gpt-oss: experts with biases and clamped activations in every block, attention sinks, and a sliding window
in every other block (arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import Fused, ParameterRow, block_rows
from toolkit.models.common.spec import ModelSpec
from toolkit.models.gpt_oss.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub

_FUSED = {
    "w1": ("mlp.experts.gate_up_proj", Fused(0, 2, interleaved=True)),
    "w2": ("mlp.experts.down_proj", Fused()),
    "w3": ("mlp.experts.gate_up_proj", Fused(1, 2, interleaved=True)),
}


class _GptOss(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.gpt_oss.hf_config import GptOssConfig

        return GptOssConfig(
            "gpt_oss", "GptOssForCausalLM", "a GptOss", 131072, head_dim=64, n_kv_heads=8, qkv_bias=True,
            sliding_window=128, norm_eps=1e-5, rope_theta=150000.0,
        )  # fmt: skip

    def block(self, args: ModelArgs, layer: int) -> Sequence[ParameterRow]:
        return [_published(row) for row in block_rows(args, layer)]

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        return Hub("openai", {"gpt-oss-20b": ("gpt_oss", "20B"), "gpt-oss-120b": ("gpt_oss", "120B")})


def _published(row: ParameterRow) -> ParameterRow:
    """Return the row with its name and layout in published files. LoRA does not apply to the router, which is
    not a linear layer in transformers."""
    if not row.experts:
        return replace(row, hf=row.hf.replace("mlp.gate.", "mlp.router."), router=False)
    weight, _, bias = row.name.rpartition(".")[2].partition("_")
    hf, fused = _FUSED[weight]
    return replace(row, hf=f"{hf}_bias" if bias else hf, fused=fused)


SPEC = _GptOss(PRESETS)
