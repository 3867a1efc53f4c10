"""The config.json of Llama 4, text-only or multimodal. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_LAYERS
from toolkit.io.json_fields import Fields, is_size
from toolkit.models.common.args import IRoPEArgs, ModelArgs, MoEArgs
from toolkit.models.common.hf_config import HFConfig

_MULTIMODAL = ["Llama4ForConditionalGeneration"]
_INTERVAL = 4
_OWN = (
    "attention_chunk_size", "layer_types", "moe_layers", "no_rope_layers", "no_rope_layer_interval",
    "use_qk_norm",
)  # fmt: skip
"""Fields that are rejected of families without them."""


class Llama4Config(HFConfig):
    """A config.json whose blocks have chunked attention or, at regular intervals, full attention without
    RoPE. The text_config of a multimodal model is read; only text models are written."""

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        if values.get("model_type") == self.multimodal_type:
            values = self._text(values, path)
        given = Fields(values)
        layers = given.count("num_hidden_layers", at_most=MAX_LAYERS)
        interval = _interval(given, layers)
        chunk = given.count("attention_chunk_size", 8192)
        if values.get("attention_chunk_size", chunk) is None:
            given.reject("attention_chunk_size", "must be a number of tokens")
        if given.values.get("layer_types", kinds := _layer_types(layers, interval)) != kinds:
            given.reject("layer_types", 'must be "chunked_attention" with RoPE and "full_attention" without')
        every = given.count("interleave_moe_layer_step", 1)
        if given.values.get("moe_layers", sparse := list(range(every - 1, layers, every))) != sparse:
            given.reject("moe_layers", f"must be every block of interleave_moe_layer_step, {sparse}")
        ffn_dim = given.count("intermediate_size_mlp", 16384)
        irope = _irope(given)
        given.finish(f"{path} does not describe {self.display_name} that is supported")
        args = super().read({key: it for key, it in values.items() if key not in _OWN}, path)
        args = replace(args, ffn_dim=ffn_dim, sliding_window=chunk, irope=irope)
        return replace(args, full_attention_step=interval)

    def write(self, args: ModelArgs, **others: Any) -> dict[str, Any]:
        irope, interval = args.irope, args.full_attention_step
        assert irope is not None
        fields = {
            "attention_bias": False,
            "attention_chunk_size": args.sliding_window,
            "attn_scale": irope.temperature or IRoPEArgs.temperature,
            "attn_temperature_tuning": irope.temperature > 0,
            "floor_scale": irope.temperature_floor,
            "intermediate_size_mlp": args.ffn_dim,
            "layer_types": _layer_types(args.n_layers, interval),
            "no_rope_layer_interval": interval or _INTERVAL,
            "no_rope_layers": _rope_layers(args.n_layers, interval),
            "use_qk_norm": irope.qk_norm,
        }
        return dict(sorted((super().write(args, **others) | fields).items()))

    def read_moe(self, fields: Fields) -> MoEArgs:
        experts, top_k = self.read_choice(fields, "num_local_experts", 16, 1)
        return MoEArgs(
            experts, top_k, fields.count("intermediate_size"), num_shared_experts=1, score_func="sigmoid",
            step=fields.count("interleave_moe_layer_step", 1), score_before_experts=True,
        )  # fmt: skip

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        return super().write_moe(args, moe) | {"interleave_moe_layer_step": moe.step}

    def _text(self, values: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the values of the text model inside a multimodal one."""
        outer = Fields(values)
        inner = outer.inner("text_config")
        if inner is None:
            outer.reject("text_config", "must describe the text model")
        if outer.values.get("architectures", _MULTIMODAL) != _MULTIMODAL:
            outer.reject("architectures", f'must be ["{_MULTIMODAL[0]}"]')
        outer.finish(f"{path} does not describe {self.display_name} that is supported")
        assert inner is not None
        shared = ("quantization_config", "tie_word_embeddings", "auto_map")
        return {key: values[key] for key in shared if key in values} | inner.values


def _irope(given: Fields) -> IRoPEArgs:
    tuned = given.values.get("attn_temperature_tuning", True)  # 4 in files of the first release
    if not is_size(tuned) and not isinstance(tuned, bool):
        given.reject("attn_temperature_tuning", "must be true or false")
    return IRoPEArgs(
        qk_norm=given.flag("use_qk_norm", True),
        temperature=given.positive("attn_scale", IRoPEArgs.temperature) if tuned else 0.0,
        temperature_floor=given.count("floor_scale", IRoPEArgs.temperature_floor),
    )


def _interval(given: Fields, layers: int) -> int:
    """Return the distance between blocks without RoPE; 0 if there are none."""
    interval = given.count("no_rope_layer_interval", _INTERVAL)
    listed = given.values.get("no_rope_layers") or _rope_layers(layers, interval)
    if not isinstance(listed, list) or (listed := listed[:layers]) != _rope_layers(layers, interval):
        interval = listed.index(0) + 1 if isinstance(listed, list) and 0 in listed else 0
        if listed != _rope_layers(layers, interval):
            given.reject("no_rope_layers", "must be 0 at equal distances, and else 1")
    return interval


def _rope_layers(layers: int, interval: int) -> list[int]:
    return [int(not interval or (layer + 1) % interval != 0) for layer in range(layers)]


def _layer_types(layers: int, interval: int) -> list[str]:
    return ["chunked_attention" if it else "full_attention" for it in _rope_layers(layers, interval)]
