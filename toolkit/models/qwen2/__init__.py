"""Qwen2.5, and Qwen2 of the same shape: a Llama whose queries, keys and values have biases
(arXiv:2412.15115)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.common.spec import ModelSpec
from toolkit.models.qwen2.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub


class _Qwen2(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.common.hf_config import HFConfig

        return HFConfig(
            "qwen2", "Qwen2ForCausalLM", "a Qwen2", 32768, n_kv_heads=32, qkv_bias=True,
            extra={"use_sliding_window": False},
        )  # fmt: skip

    def hub(self) -> Hub:
        from toolkit.models.qwen2.hub import HUB

        return HUB


SPEC = _Qwen2(PRESETS)
