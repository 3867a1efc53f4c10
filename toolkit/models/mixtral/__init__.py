"""Mixtral: a Mistral with a mixture of experts in every block (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import ParameterRow, block_rows
from toolkit.models.common.spec import ModelSpec
from toolkit.models.mixtral.args import PRESETS

if TYPE_CHECKING:
    from toolkit.models.common.hf_config import HFConfig
    from toolkit.models.common.hub import Hub

_PUBLISHED = {
    "Mixtral-8x7B-v0.1": ("mixtral", "8x7B"),
    "Mixtral-8x7B-Instruct-v0.1": ("mixtral", "8x7B"),
    "Mixtral-8x22B-v0.1": ("mixtral", "8x22B"),
}
_HF_NAMES = {
    "mlp.gate.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.{}.gate_proj.weight": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.{}.down_proj.weight": "block_sparse_moe.experts.{}.w2.weight",
    "mlp.experts.{}.up_proj.weight": "block_sparse_moe.experts.{}.w3.weight",
}


class _Mixtral(ModelSpec):
    def hf_config(self) -> HFConfig:
        from toolkit.models.mixtral.hf_config import MixtralConfig

        return MixtralConfig(
            "mixtral", "MixtralForCausalLM", "a Mixtral", 131072, n_kv_heads=8, norm_eps=1e-5, rope_theta=1e6,
            extra={"router_jitter_noise": 0.0},
        )  # fmt: skip

    def block(self, args: ModelArgs, layer: int) -> Sequence[ParameterRow]:
        return [replace(row, hf=_HF_NAMES.get(row.hf, row.hf)) for row in block_rows(args, layer)]

    def hub(self) -> Hub:
        from toolkit.models.common.hub import Hub

        return Hub("mistralai", _PUBLISHED)


SPEC = _Mixtral(PRESETS)
