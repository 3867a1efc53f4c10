"""The config.json of gpt-oss. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_LAYERS
from toolkit.io.json_fields import Fields
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.common.hf_config import HFConfig

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""RoPE scaling of a config.json without one."""
_STEP = 2


class GptOssConfig(HFConfig):
    """A config.json whose blocks alternate between a sliding window and full attention. Weights in MXFP4 are
    accepted, because :mod:`toolkit.weights.fused_experts` dequantizes them."""

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        fields = Fields(values)
        layers = fields.count("num_hidden_layers", at_most=MAX_LAYERS)
        if fields.values.get("layer_types", _layer_types(layers)) != _layer_types(layers):
            fields.reject("layer_types", f"must alternate, as {_layer_types(_STEP)} does")
        if not fields.flag("attention_bias", True):
            fields.reject(
                "attention_bias", f"must be true: the projections of {self.display_name} have biases"
            )
        if values.get("sliding_window", 0) is None:
            fields.reject("sliding_window", "must be a number of tokens")
        fields.finish(f"{path} does not describe {self.display_name} that is supported")
        readable = {key: it for key, it in values.items() if key not in ("layer_types", "attention_bias")}
        quantized = values.get("quantization_config")
        if isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4":
            del readable["quantization_config"]
        if not values.get("rope_scaling") and not values.get("rope_parameters"):
            readable["rope_scaling"] = _ROPE
        args = super().read(readable, path)
        return replace(args, out_bias=True, sinks=True, full_attention_step=_STEP)

    def write(self, args: ModelArgs, **others: Any) -> dict[str, Any]:
        fields = super().write(args, **others)
        fields |= {"attention_bias": True, "layer_types": _layer_types(args.n_layers)}
        fields["rope_scaling"] = fields["rope_scaling"] or {"rope_type": "default"}
        return dict(sorted(fields.items()))

    def read_moe(self, fields: Fields) -> MoEArgs:
        experts, top_k = self.read_choice(fields, "num_local_experts", 128, 4)
        return MoEArgs(
            experts, top_k, fields.count("intermediate_size"), route_norm=True, bias=True,
            swiglu_limit=fields.positive("swiglu_limit", 7.0),
            swiglu_alpha=fields.positive("swiglu_alpha", 1.702),
        )  # fmt: skip

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        activation = {"swiglu_alpha": moe.swiglu_alpha, "swiglu_limit": moe.swiglu_limit}
        return super().write_moe(args, moe) | activation


def _layer_types(layers: int) -> list[str]:
    return ["full_attention" if (layer + 1) % _STEP == 0 else "sliding_attention" for layer in range(layers)]
