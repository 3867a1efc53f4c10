"""Dense Qwen3, with Llama's architecture, RMSNorm on each head of queries and keys, and a head dim of 128 at
every size (arXiv:2505.09388)."""

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
