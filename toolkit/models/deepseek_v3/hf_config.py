"""Latent attention and experts in config.json of a DeepSeek-V3. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.io.json_fields import Fields
from toolkit.models.common.args import MLAArgs, ModelArgs, MoEArgs
from toolkit.models.common.hf_config import EXPERTS, HFConfig

_FIXED: dict[str, Any] = {
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


class DeepSeekV3Config(HFConfig):
    """A config.json with latent attention. Its head_dim, if any, is that of the rotated part."""

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        fields = Fields(values)
        for key, value in _FIXED.items():
            if fields.values.get(key, value) != value:
                fields.reject(key, f"must be {value!r}")
        mla = MLAArgs(
            q_lora_rank=fields.count("q_lora_rank") if fields.values.get("q_lora_rank") else 0,
            kv_lora_rank=fields.count("kv_lora_rank", 512),
            qk_nope_head_dim=fields.count("qk_nope_head_dim", 128),
            qk_rope_head_dim=fields.count("qk_rope_head_dim", 64),
            v_head_dim=fields.count("v_head_dim", 128),
        )
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.qk_rope_head_dim % 2:
            fields.reject("qk_rope_head_dim", "must be even, because RoPE rotates pairs")
        if mla.v_head_dim > head_dim:
            fields.reject("v_head_dim", f"must be at most qk_nope_head_dim + qk_rope_head_dim, {head_dim}")
        heads = fields.values.get("num_attention_heads")
        if fields.values.get("num_key_value_heads", heads) != heads:
            fields.reject("num_key_value_heads", f"must be num_attention_heads, which is {heads}")
        fields.finish(f"{path} does not describe {self.display_name} that is supported")
        args = super().read({**values, "head_dim": head_dim}, path)
        return replace(args, mla=mla)

    def write(self, args: ModelArgs, **others: Any) -> dict[str, Any]:
        mla = args.mla
        assert mla is not None
        fields = super().write(args, **others)
        fields["head_dim"] = mla.qk_rope_head_dim
        fields |= _FIXED | {
            "kv_lora_rank": mla.kv_lora_rank,
            "q_lora_rank": mla.q_lora_rank or None,
            "qk_nope_head_dim": mla.qk_nope_head_dim,
            "qk_rope_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
        }
        return dict(sorted(fields.items()))

    def read_moe(self, fields: Fields) -> MoEArgs:
        names = ("n_routed_experts", *EXPERTS)
        key = next((key for key in names if key in fields.values), names[0])
        experts, top_k = fields.count(key, 256), fields.count("num_experts_per_tok", 8)
        groups, limited = fields.count("n_group", 8), fields.count("topk_group", 4)
        if top_k > experts:
            fields.reject("num_experts_per_tok", f"must be at most {key}, which is {experts}")
        if groups > 1 and (experts % groups or experts // groups < 2):
            fields.reject("n_group", f"must divide {key}, which is {experts}, into groups of two or more")
        elif limited > groups or top_k > limited * (experts // groups):
            fields.reject("topk_group", f"must leave {top_k} experts of {groups} groups to choose from")
        return MoEArgs(
            num_experts=experts,
            top_k=top_k,
            ffn_dim=fields.count("moe_intermediate_size", 2048),
            num_shared_experts=fields.count("n_shared_experts", 1),
            score_func="sigmoid",
            route_norm=fields.flag("norm_topk_prob", True),
            route_scale=fields.positive("routed_scaling_factor", 2.5),
            expert_bias=True,
            num_expert_groups=groups if groups > 1 else 0,
            num_limited_groups=limited if groups > 1 else 0,
            first_dense=int(fields.values.get("first_k_dense_replace", 3)),
        )

    def write_moe(self, args: ModelArgs) -> dict[str, Any]:
        moe = args.moe
        assert moe is not None
        return {
            "first_k_dense_replace": moe.first_dense,
            "moe_intermediate_size": moe.ffn_dim,
            "n_group": moe.num_expert_groups or 1,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.num_shared_experts,
            "norm_topk_prob": moe.route_norm,
            "num_experts_per_tok": moe.top_k,
            "num_nextn_predict_layers": 0,
            "routed_scaling_factor": moe.route_scale,
            "topk_group": moe.num_limited_groups or 1,
        }
