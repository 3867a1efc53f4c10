"""A family of the tests whose blocks have all that a mixture of experts may have, after a dense first one."""

from __future__ import annotations

from dataclasses import replace

from toolkit.extensions import register_family
from toolkit.models.common.args import MoEArgs
from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.spec import ModelSpec
from toolkit.models.registry import resolve


class _Experts(ModelSpec):
    def hf_config(self) -> HFConfig:
        return HFConfig("experts", "ExpertsForCausalLM", "a model of experts", 2048)


_SIZE = replace(
    resolve("llama3.1", "debugmodel"),
    rope_scaling=None,
    family="experts",
    moe=MoEArgs(
        num_experts=8,
        top_k=2,
        ffn_dim=12,
        num_shared_experts=1,
        score_func="sigmoid",
        route_norm=True,
        route_scale=1.5,
        expert_bias=True,
        num_expert_groups=4,
        num_limited_groups=2,
        first_dense=1,
    ),
)
assert _SIZE.moe is not None
_WIDE = replace(_SIZE, moe=replace(_SIZE.moe, ffn_dim=128))  # of which tp2 leaves a block of 64
register_family("experts", _Experts({"experts": {"debugmodel": _SIZE, "wide": _WIDE}}))
