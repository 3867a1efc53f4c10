"""Llama 2, 3, 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.models.common.spec import MetaParams, ModelSpec
from toolkit.models.llama.args import PRESETS, ffn_rule

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub
    from toolkit.models.common.tiktoken_form import TiktokenForm


class _Llama(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.common.hf_config import HFConfig

        extra = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
        return HFConfig("llama", "LlamaForCausalLM", "a Llama", 2048, extra=extra)

    def meta_params(self) -> MetaParams:
        from toolkit.models.llama import meta_params

        return meta_params

    def tiktoken_forms(self) -> Sequence[TiktokenForm]:
        from toolkit.models.llama.tokenizer import FORMS

        return FORMS

    def chat_formats(self) -> Mapping[str, type[ChatFormat]]:
        from toolkit.models.llama.chat import FORMATS

        return FORMATS

    def hub(self) -> Hub:
        from toolkit.models.llama.hub import HUB

        return HUB


SPEC = _Llama(PRESETS, ffn_rule)
