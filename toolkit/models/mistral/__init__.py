"""Mistral, with Llama's architecture and, in its first release, a sliding window of 4,096 tokens
(arXiv:2310.06825). The 12B model, Nemo, has a head dim of 128 with a dim of 5,120."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toolkit.models.common.spec import ModelSpec
from toolkit.models.mistral.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub


_PUBLISHED = {
    "Mistral-7B-v0.1": ("mistral0.1", "7B"),
    "Mistral-7B-Instruct-v0.1": ("mistral0.1", "7B"),
    "Mistral-7B-Instruct-v0.2": ("mistral0.2", "7B"),
    "Mistral-7B-v0.3": ("mistral0.3", "7B"),
    "Mistral-7B-Instruct-v0.3": ("mistral0.3", "7B"),
    "Mistral-Nemo-Base-2407": ("mistral-nemo", "12B"),
    "Mistral-Nemo-Instruct-2407": ("mistral-nemo", "12B"),
}


class _Mistral(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.common.hf_config import HFConfig

        return HFConfig(
            "mistral", "MistralForCausalLM", "a Mistral", 131072, n_kv_heads=8, sliding_window=4096
        )

    def chat_formats(self) -> Mapping[str, type[ChatFormat]]:
        from toolkit.models.mistral.chat import MistralFormat

        return {MistralFormat.name: MistralFormat}

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        return Hub("mistralai", _PUBLISHED)


SPEC = _Mistral(PRESETS)
