"""Conversion between Meta's params.json and :class:`ModelArgs`. Imports no torch.

The file omits much; the defaults are those of Meta's code and releases. The feed-forward width is computed
from dim, a multiplier and a multiple. vocab_size −1 means the tokenizer's. Scaled RoPE ("use_scaled_rope")
has factor 8, and embeddings are not tied; but the two small models of Llama 3.2, recognized by their sizes,
have factor 32 and tied embeddings. Contexts are 4096 (Llama 2), 8192 (Llama 3) and 131072 (scaled). Other
programs write these fields explicitly (hidden_dim, tied_embeddings, max_seq_len, …). Such fields are read,
but written only where Meta's rules would give another value, because Meta's programs reject unknown fields.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_LAYERS, MAX_SIZE
from toolkit.io.json_fields import Fields, check_heads, is_count, read_object
from toolkit.models.common.args import ModelArgs, RopeScaling, Scaling
from toolkit.models.common.spec import PARAMS
from toolkit.models.llama.args import PRESETS, meta_ffn_dim

_OTHER_MODELS = {
    "moe_args": "mixtures of experts are not supported",
    "vision_chunk_size": "vision models are not supported",
    "vision_num_cross_attention_layers": "vision models are not supported",
    "vision_args": "vision models are not supported",
    "quantization_args": "quantized weights are not supported",
    "lora_args": "weights with LoRA adapters are not supported",
    "use_qk_norm": "a Llama does not normalize queries and keys",
    "attention_chunk_size": "a Llama attends to all earlier tokens",
    "nope_layer_interval": "every layer of a Llama uses RoPE",
}
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
_TIED_RELEASES = [PRESETS["llama3.2"][flavor] for flavor in ("1B", "3B")]
_LONG = 131072


def read_args(folder: Path, *, vocab_size: int) -> ModelArgs:
    """Read the model args from params.json in ``folder``.

    ``vocab_size`` is the embedding's, for a file that leaves it to the tokenizer (−1 or absent).

    Raises:
            DataError: the file is missing, or describes another model; every invalid field is reported.
    """
    path = folder / PARAMS
    values = read_object(path)
    fields = Fields({key: value for key, value in values.items() if (key, value) != ("vocab_size", -1)})
    for key, why in _OTHER_MODELS.items():
        if fields.values.get(key):
            fields.reject(key, why)
    dim, n_heads = fields.count("dim"), fields.count("n_heads")
    n_kv_heads = fields.count("n_kv_heads", n_heads)
    if "head_dim" not in fields.values and dim % n_heads:
        fields.reject("dim", f"must be a multiple of n_heads, which is {n_heads}")
    args = ModelArgs(
        dim=dim,
        n_layers=fields.count("n_layers", at_most=MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=_ffn_dim(fields, dim),
        vocab_size=fields.count("vocab_size", vocab_size),
        head_dim=fields.count("head_dim", max(1, dim // n_heads)),
        norm_eps=fields.positive("norm_eps", 1e-5),
        rope_theta=fields.positive("rope_theta", 10000.0),
    )
    scaled = fields.flag("use_scaled_rope")
    args = _as_released(args, scaled=scaled)
    args = replace(
        args,
        rope_scaling=_read_scaling(fields, args.rope_scaling) if scaled else None,
        max_seq_len=fields.count("max_seq_len", args.max_seq_len),
        tie_embeddings=fields.flag("tied_embeddings", args.tie_embeddings),
    )
    check_heads(fields, heads="n_heads", kv_heads="n_kv_heads", n_heads=n_heads, n_kv_heads=n_kv_heads)
    if args.head_dim % 2 and not fields.problems:
        fields.reject("head_dim", f"must be even, because RoPE rotates pairs, and it is {args.head_dim}")
    fields.finish(f"{path} does not describe a Llama that is supported")
    return args


def params_json(args: ModelArgs) -> dict[str, Any]:
    """Build the params.json of a model. Meta's programs can read it, unless the model needs a field that only
    other programs use."""
    released = _as_released(args, scaled=args.rope_scaling is not None)
    multiplier, multiple = _ffn_rule(args.dim, args.ffn_dim)
    params: dict[str, Any] = {
        "dim": args.dim,
        "n_layers": args.n_layers,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "vocab_size": args.vocab_size,
        "multiple_of": multiple,
        "norm_eps": args.norm_eps,
    }
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    if args.n_kv_heads == args.n_heads:
        del params["n_kv_heads"]
    if args.rope_theta != 10000.0:
        params["rope_theta"] = args.rope_theta
    if args.head_dim * args.n_heads != args.dim:
        params["head_dim"] = args.head_dim
    if args.rope_scaling is not None:
        params["use_scaled_rope"] = True
        omitted = _scaling_fields(released.rope_scaling)
        given = _scaling_fields(args.rope_scaling).items()
        params |= {f"rope_{key}": value for key, value in given if value != omitted[key]}
    if args.max_seq_len != released.max_seq_len:
        params["max_seq_len"] = args.max_seq_len
    if args.tie_embeddings != released.tie_embeddings:
        params["tied_embeddings"] = args.tie_embeddings
    return params


def _as_released(args: ModelArgs, *, scaled: bool) -> ModelArgs:
    """Return ``args`` with the fields that the file omits set as in Meta's releases of these sizes."""
    small = scaled and any(
        all(getattr(args, size) == getattr(release, size) for size in _SIZES) for release in _TIED_RELEASES
    )
    unscaled = 4096 if args.rope_theta == 10000.0 else 8192
    return replace(
        args,
        rope_scaling=RopeScaling(32.0 if small else 8.0) if scaled else None,
        max_seq_len=_LONG if scaled else unscaled,
        tie_embeddings=small,
    )


def _scaling_fields(scaling: Scaling | None) -> dict[str, float]:
    assert isinstance(scaling, RopeScaling), "a conversion rejects other kinds"
    return {
        "scaling_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_seq_len": scaling.original_max_seq_len,
    }


def _read_scaling(fields: Fields, released: Scaling | None) -> RopeScaling:
    assert isinstance(released, RopeScaling)
    return RopeScaling(
        fields.positive("rope_scaling_factor", released.factor),
        fields.positive("rope_low_freq_factor", released.low_freq_factor),
        fields.positive("rope_high_freq_factor", released.high_freq_factor),
        fields.count("rope_original_max_seq_len", released.original_max_seq_len),
    )


def _ffn_dim(fields: Fields, dim: int) -> int:
    if "hidden_dim" in fields.values:
        return fields.count("hidden_dim")
    multiplier, multiple_of = fields.positive("ffn_dim_multiplier", 1.0), fields.count("multiple_of", 256)
    try:
        size = meta_ffn_dim(dim, multiplier, multiple_of)
    except OverflowError:
        size = 0
    if not is_count(size, at_most=MAX_SIZE):
        key = "ffn_dim_multiplier" if "ffn_dim_multiplier" in fields.values else "multiple_of"
        fields.reject(key, f"gives a feed-forward width outside 1 to {MAX_SIZE:,}")
    return size


def _ffn_rule(dim: int, ffn_dim: int) -> tuple[float | None, int]:
    """Return a multiplier and a multiple that give ``ffn_dim`` by Meta's rule, those of a release if
    possible."""
    for multiple in (256, 1024, 4096):
        for multiplier in (None, 1.3, 1.2, 1.5):
            if meta_ffn_dim(dim, multiplier or 1.0, multiple) == ffn_dim:
                return multiplier, multiple
    # Half a unit above the width, so that rounding down gives the width despite the division's error.
    return (ffn_dim + 0.5) / int(8 * dim / 3), 1
