"""Fields of latent attention and its experts in config.json, as in DeepSeek's models. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.io.json_fields import Fields, is_size
from toolkit.models.common.args import MLAArgs, ModelArgs, MoEArgs
from toolkit.models.common.hf_config import HFConfig

_FP8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
"""The ``quantization_config`` of weights that :mod:`toolkit.weights.safetensors` dequantizes."""


@dataclass(frozen=True)
class MLAConfig(HFConfig):
    """A config.json with latent attention. The file's head_dim, if any, is that of the rotated part.

    Attributes:
        experts: defaults of absent fields.
    """

    experts: MoEArgs = MoEArgs(1, 1, 1)

    @property
    @abstractmethod
    def fixed(self) -> dict[str, Any]:
        """Fields for which only one value is supported."""

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        fields = Fields(values)
        for key, value in self.fixed.items():
            if fields.values.get(key, value) != value:
                fields.reject(key, f"must be {value!r}")
        mla = MLAArgs(
            q_lora_rank=fields.count("q_lora_rank", 1536) if values.get("q_lora_rank", 1536) else 0,
            kv_lora_rank=fields.count("kv_lora_rank", 512),
            qk_nope_head_dim=fields.count("qk_nope_head_dim", 128),
            qk_rope_head_dim=fields.count("qk_rope_head_dim", 64),
            v_head_dim=fields.count("v_head_dim", 128),
        )
        if mla.qk_rope_head_dim % 2:
            fields.reject("qk_rope_head_dim", "must be even, because RoPE rotates pairs")
        if mla.v_head_dim > mla.head_dim:
            rule = f"must be at most qk_nope_head_dim + qk_rope_head_dim, {mla.head_dim}"
            fields.reject("v_head_dim", rule)
        heads = fields.values.get("num_attention_heads")
        if fields.values.get("num_key_value_heads", heads) != heads:
            fields.reject("num_key_value_heads", f"must be num_attention_heads, which is {heads}")
        fields.finish(f"{path} does not describe {self.display_name} that is supported")
        return replace(super().read(_readable(values, mla), path), mla=mla)

    def write(self, args: ModelArgs, **others: Any) -> dict[str, Any]:
        mla = args.mla
        assert mla is not None
        fields = super().write(args, **others) | self.fixed | asdict(mla)
        fields |= {"head_dim": mla.qk_rope_head_dim, "q_lora_rank": mla.q_lora_rank or None}
        return dict(sorted(fields.items()))

    def read_moe(self, fields: Fields) -> MoEArgs:
        absent = self.experts
        experts, top_k = self.read_choice(fields, "n_routed_experts", absent.num_experts, absent.top_k)
        groups = fields.count("n_group", absent.num_expert_groups or 1)
        limited = fields.count("topk_group", absent.num_limited_groups or 1)
        if groups > 1 and (experts % groups or experts // groups < 2):
            rule = f"must divide the number of experts, {experts}, into groups of two or more"
            fields.reject("n_group", rule)
        elif limited > groups or top_k > limited * (experts // groups):
            fields.reject("topk_group", f"must leave {top_k} experts of {groups} groups to choose from")
        dense = fields.values.get("first_k_dense_replace", absent.first_dense)
        if not is_size(dense):
            fields.reject("first_k_dense_replace", "must be a nonnegative integer")
            dense = 0
        return replace(
            absent,
            num_experts=experts,
            top_k=top_k,
            ffn_dim=fields.count("moe_intermediate_size", absent.ffn_dim),
            num_shared_experts=fields.count("n_shared_experts", absent.num_shared_experts),
            route_norm=fields.flag("norm_topk_prob", absent.route_norm),
            route_scale=fields.positive("routed_scaling_factor", absent.route_scale),
            num_expert_groups=groups if groups > 1 else 0,
            num_limited_groups=limited if groups > 1 else 0,
            first_dense=dense,
        )

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        return {
            "first_k_dense_replace": moe.first_dense,
            "moe_intermediate_size": moe.ffn_dim,
            "n_group": moe.num_expert_groups or 1,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.num_shared_experts,
            "norm_topk_prob": moe.route_norm,
            "num_experts_per_tok": moe.top_k,
            "routed_scaling_factor": moe.route_scale,
            "topk_group": moe.num_limited_groups or 1,
        }


def _readable(values: dict[str, Any], mla: MLAArgs) -> dict[str, Any]:
    """Return ``values`` with the head dim of queries and keys, and without two fields of published folders
    that need not be supported: the model code and the FP8 format of the weights."""
    values = {**values, "head_dim": mla.head_dim}
    code, quantized = values.get("auto_map"), values.get("quantization_config")
    if isinstance(code, dict) and all(
        str(it).partition(".")[2].startswith("Deepseek") for it in code.values()
    ):
        del values["auto_map"]
    if isinstance(quantized, dict) and _FP8.items() <= quantized.items():
        del values["quantization_config"]
    return values
