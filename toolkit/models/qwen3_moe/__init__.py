"""Qwen3 with a mixture of experts in every block (arXiv:2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.common.spec import ModelSpec
from toolkit.models.qwen3_moe.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig


class _Qwen3MoE(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.qwen3_moe.hf_config import Qwen3MoEConfig

        return Qwen3MoEConfig(
            "qwen3_moe", "Qwen3MoeForCausalLM", "a Qwen3Moe", 32768, n_kv_heads=4, qk_norm=True,
            extra={"attention_bias": False, "use_sliding_window": False},
        )  # fmt: skip


SPEC = _Qwen3MoE(PRESETS)
