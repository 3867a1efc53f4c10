"""DeepSeek-V2: latent attention, and a mixture of experts after the first block (arXiv:2405.04434)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.common.args import MoEArgs
from toolkit.models.common.spec import ModelSpec
from toolkit.models.deepseek_v2.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub

_PUBLISHED = {
    "DeepSeek-V2-Lite": ("deepseek_v2", "16B"),
    "DeepSeek-V2-Lite-Chat": ("deepseek_v2", "16B"),
    "DeepSeek-V2": ("deepseek_v2", "236B"),
    "DeepSeek-V2-Chat": ("deepseek_v2", "236B"),
}


class _DeepSeekV2(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.deepseek_v2.hf_config import DeepSeekV2Config

        return DeepSeekV2Config(
            "deepseek_v2", "DeepseekV2ForCausalLM", "a DeepseekV2", 2048,
            experts=MoEArgs(num_experts=64, top_k=1, ffn_dim=1407, num_shared_experts=2),
        )  # fmt: skip

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        return Hub("deepseek-ai", _PUBLISHED)


SPEC = _DeepSeekV2(PRESETS)
