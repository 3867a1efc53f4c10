"""DeepSeek-V3 and Moonlight: latent attention, and a mixture of experts after the first blocks
(arXiv:2412.19437)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.common.args import MoEArgs
from toolkit.models.common.spec import ModelSpec
from toolkit.models.deepseek_v3.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub

_EXPERTS = MoEArgs(
    num_experts=256, top_k=8, ffn_dim=2048, num_shared_experts=1, score_func="sigmoid", route_norm=True,
    route_scale=2.5, expert_bias=True, num_expert_groups=8, num_limited_groups=4, first_dense=3,
)  # fmt: skip


class _DeepSeekV3(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.deepseek_v3.hf_config import DeepSeekV3Config

        return DeepSeekV3Config(
            "deepseek_v3", "DeepseekV3ForCausalLM", "a DeepseekV3", 4096, experts=_EXPERTS,
            extra={"num_nextn_predict_layers": 0},
        )  # fmt: skip

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        names = ("DeepSeek-V3-Base", "DeepSeek-V3", "DeepSeek-V3-0324", "DeepSeek-R1")
        return Hub("deepseek-ai", dict.fromkeys(names, ("deepseek_v3", "671B")))


SPEC = _DeepSeekV3(PRESETS)
