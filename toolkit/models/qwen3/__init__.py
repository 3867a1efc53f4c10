"""Qwen3, dense: a Llama that normalises each head of its queries and keys, and whose heads have 128 numbers
whatever its dim (arXiv:2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.common.spec import ModelSpec
from toolkit.models.qwen3.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig


class _Qwen3(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.common.hf_config import HFConfig

        return HFConfig(
            "qwen3", "Qwen3ForCausalLM", "a Qwen3", 32768, head_dim=128, n_kv_heads=32, qk_norm=True,
            extra={"attention_bias": False, "use_sliding_window": False},
        )  # fmt: skip


SPEC = _Qwen3(PRESETS)
