"""DeepSeek-V3 and Moonlight: latent attention, and a mixture of experts after the first blocks
(arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import ParameterRow, expert_block
from toolkit.models.common.spec import ModelSpec
from toolkit.models.deepseek_v3.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig


class _DeepSeekV3(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.deepseek_v3.hf_config import DeepSeekV3Config

        return DeepSeekV3Config("deepseek_v3", "DeepseekV3ForCausalLM", "a DeepSeek-V3", 4096)

    def block(self, args: ModelArgs, layer: int) -> Sequence[ParameterRow]:
        return expert_block(args, layer)


SPEC = _DeepSeekV3(PRESETS)
