"""The experts in config.json of a Qwen3 with experts. Imports no torch."""

from __future__ import annotations

from typing import Any

from toolkit.io.json_fields import Fields
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.common.hf_config import HFConfig


class Qwen3MoEConfig(HFConfig):
    """A config.json with experts. The coefficient of transformers' balancing loss, router_aux_loss_coef, is
    not read, because a run configures its own."""

    def read_moe(self, fields: Fields) -> MoEArgs:
        experts, top_k = self.read_choice(fields, "num_experts", 128, 8)
        if fields.count("decoder_sparse_step", 1) != 1:
            fields.reject("decoder_sparse_step", "must be 1: other steps between experts are not supported")
        dense = fields.values.get("mlp_only_layers", [])
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            fields.reject("mlp_only_layers", "must be empty, or the first layers as [0, 1] are")
            dense = []
        return MoEArgs(
            num_experts=experts,
            top_k=top_k,
            ffn_dim=fields.count("moe_intermediate_size", 768),
            route_norm=fields.flag("norm_topk_prob"),
            first_dense=len(dense),
        )

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(args.n_layers) if not moe.has_experts(layer)],
            "moe_intermediate_size": moe.ffn_dim,
            "norm_topk_prob": moe.route_norm,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
