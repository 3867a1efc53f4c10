"""Conversion between Hugging Face's config.json and :class:`ModelArgs`. Imports no torch.

transformers 4 writes rope_theta, rope_scaling and torch_dtype. transformers 5 writes rope_parameters and
dtype, but still reads the older format, so the older format is written here. Absent fields have the defaults
of transformers' class; sizes are required. Fields that would change the computation are rejected, not
ignored, except attention_dropout, which affects only training and is reported by the preflight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_LAYERS
from toolkit.errors import DataError
from toolkit.io.json_fields import Fields, check_heads
from toolkit.models.common.args import (
    Classifier,
    LinearScaling,
    ModelArgs,
    MoEArgs,
    RopeScaling,
    Scaling,
    YarnScaling,
    yarn_factor,
)

GENERATION_CONFIG = "generation_config.json"
_ONE_LABEL = "single_label_classification"

_EXPERTS = ("num_experts", "num_local_experts")
"""Names of the number of experts, in different versions of transformers."""

_MUST_BE_FALSE = {
    "attention_bias": "the output projection of {it} has no bias",
    "mlp_bias": "the feed-forward of {it} has no bias",
    "bias": "the output projection of {it} has no bias",
    "qkv_bias": "queries, keys and values of {it} have no bias",
    "use_qk_norm": "{it} does not normalize queries and keys",
    "qk_layernorm": "{it} does not normalize queries and keys",
    "use_sliding_window": "windows in some layers of {it} are not supported",
    "is_encoder_decoder": "{it} is decoder-only",
    "add_cross_attention": "{it} is decoder-only",
}
_MUST_BE_ABSENT = {
    "sliding_window": "{it} attends to all earlier tokens",
    "attention_chunk_size": "{it} attends to all earlier tokens",
    "attn_logit_softcapping": "{it} does not cap its attention",
    "final_logit_softcapping": "{it} does not cap its logits",
    "no_rope_layers": "every layer of {it} uses RoPE",
    "quantization_config": "quantized weights are not supported: use the original model",
}
_MUST_BE_ONE = {
    "partial_rotary_factor": "{it} applies RoPE to the whole head",
    "attention_multiplier": "{it} has no such scale",
    "embedding_multiplier": "{it} has no such scale",
    "logits_scaling": "{it} has no such scale",
    "residual_multiplier": "{it} has no such scale",
}


@dataclass(frozen=True)
class HFConfig:
    """Reader and writer of a family's config.json, with its names and the defaults of absent fields.

    Attributes:
        display_name: the family in messages, such as "a Llama".
        multimodal_type: model_type of a config.json whose text_config describes a model of the family.
        classifies: whether transformers has the family with a classification head.
        head_dim: default; None means ``hidden_size / num_attention_heads``.
        n_kv_heads: default; None here, or null in the file, means ``num_attention_heads``.
        sliding_window: default (null in the file means no window); None if the family has no windows.
        norm_eps, rope_theta: defaults.
        extra: additional fields to write.
    """

    model_type: str
    architecture: str
    display_name: str
    max_seq_len: int
    head_dim: int | None = None
    n_kv_heads: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    sliding_window: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    multimodal_type: str | None = None
    classifies: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        """Read the model args from the ``values`` of the config.json at ``path``.

        Raises:
                DataError: another family, or an unsupported model; every invalid field is reported.
        """
        fields = Fields(values)
        self._reject_other_models(fields)
        dim, n_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        default = values.get("num_key_value_heads", self.n_kv_heads) or n_heads
        n_kv_heads = fields.count("num_key_value_heads", default)
        max_seq_len = fields.count("max_position_embeddings", self.max_seq_len)
        theta, scaling = self._rope(fields, max_seq_len)
        if "head_dim" not in fields.values and not self.head_dim and dim % n_heads:
            fields.reject("hidden_size", f"must be a multiple of num_attention_heads, which is {n_heads}")
        args = ModelArgs(
            dim=dim,
            n_layers=fields.count("num_hidden_layers", at_most=MAX_LAYERS),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            ffn_dim=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            head_dim=fields.count("head_dim", self.head_dim or max(1, dim // n_heads)),
            norm_eps=fields.positive("rms_norm_eps", self.norm_eps),
            rope_theta=theta,
            rope_scaling=scaling,
            max_seq_len=max_seq_len,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            sliding_window=self._window(fields, values),
            family=self.model_type,
            classifier=self._classifier(fields),
            moe=self.read_moe(fields),
        )
        if args.classifier:
            args = replace(args, tie_embeddings=False)
        check_heads(
            fields,
            heads="num_attention_heads",
            kv_heads="num_key_value_heads",
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
        )
        if args.head_dim % 2 and not fields.problems:
            fields.reject("head_dim", f"must be even, because RoPE rotates pairs, and it is {args.head_dim}")
        fields.finish(f"{path} does not describe {self.display_name} that is supported")
        return args

    def write(
        self, args: ModelArgs, *, dtype: str, bos: int | None, eos: int | list[int] | None, pad: int | None
    ) -> dict[str, Any]:
        """Build the config.json of a model with weights of ``dtype``, readable by transformers 4 and 5.

        Raises:
            DataError: the family's config.json cannot describe the model's experts or classification head.
        """
        scaling, classifier = args.rope_scaling, args.classifier
        if classifier and not self.classifies:
            raise DataError(f"transformers has no {self.classifier}, as which {self.display_name} with a "
                            "classification head would be written")  # fmt: skip
        fields: dict[str, Any] = {
            "architectures": [self.classifier if classifier else self.architecture],
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "hidden_size": args.dim,
            "initializer_range": 0.02,
            "intermediate_size": args.ffn_dim,
            "max_position_embeddings": args.max_seq_len,
            "model_type": self.model_type,
            "num_attention_heads": args.n_heads,
            "num_hidden_layers": args.n_layers,
            "num_key_value_heads": args.n_kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": args.norm_eps,
            "rope_scaling": None if scaling is None else _scaling_fields(scaling),
            "rope_theta": args.rope_theta,
            "tie_word_embeddings": args.tie_embeddings,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": args.vocab_size,
        }
        if classifier:
            labels = dict(enumerate(classifier.labels))
            fields |= {
                "id2label": {str(index): label for index, label in labels.items()},
                "label2id": {label: index for index, label in labels.items()},
                "problem_type": _ONE_LABEL if len(labels) > 1 else None,
                "pad_token_id": _padding(bos, eos, pad, answers=len(labels) == 1),
            }
        if self.sliding_window:
            fields["sliding_window"] = args.sliding_window
        fields |= {**self.extra, **(self.write_moe(args, args.moe) if args.moe else {})}
        if self.read_moe(Fields(fields)) != args.moe:
            raise DataError(f"the config.json of {self.display_name} cannot describe {args.moe}")
        return dict(sorted(fields.items()))

    def read_moe(self, fields: Fields) -> MoEArgs | None:
        """Read the fields of experts, in families that have them; this base class rejects them."""
        for key in _EXPERTS:
            if key in fields.values:
                fields.reject(key, f"must be absent or null: {self.display_name} has no mixture of experts")
        return None

    def read_choice(self, fields: Fields, name: str, experts: int, top_k: int) -> tuple[int, int]:
        """Read the number of experts, in a field of transformers or else in ``name``, and the number that
        compute a token; ``experts`` and ``top_k`` are the defaults."""
        key = next((key for key in _EXPERTS if key in fields.values), name)
        experts, top_k = fields.count(key, experts), fields.count("num_experts_per_tok", top_k)
        if top_k > experts:
            fields.reject("num_experts_per_tok", f"must be at most {key}, which is {experts}")
        return experts, top_k

    def write_moe(self, args: ModelArgs, moe: MoEArgs) -> dict[str, Any]:
        """Return the fields that :meth:`read_moe` reads, here by their names in a Mixtral."""
        return {
            "intermediate_size": moe.ffn_dim,
            "num_experts_per_tok": moe.top_k,
            "num_local_experts": moe.num_experts,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }

    @property
    def classifier(self) -> str:
        """transformers' model class with a classification head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    def _window(self, fields: Fields, values: Mapping[str, Any]) -> int | None:
        if not self.sliding_window or values.get("sliding_window", 0) is None:
            return None
        return fields.count("sliding_window", self.sliding_window)

    def _classifier(self, fields: Fields) -> Classifier | None:
        if fields.values.get("architectures") != [self.classifier]:
            return None
        if fields.values.get("problem_type") not in (None, _ONE_LABEL):
            fields.reject("problem_type", f'must be "{_ONE_LABEL}"')
        labels = fields.values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        numbered = [str(index) for index in range(len(labels))] if isinstance(labels, dict) else []
        if not numbered or labels.keys() != set(numbered):
            fields.reject("id2label", "must have a name for each of 0, 1 and so on")
            return None
        return Classifier(tuple(str(labels[index]) for index in numbered))

    def _reject_other_models(self, fields: Fields) -> None:
        values = fields.values
        architectures = values.get("architectures", [self.architecture])
        if architectures not in ([self.architecture], [self.classifier]):
            fields.reject("architectures", f'must be ["{self.architecture}"] or ["{self.classifier}"]')
        if values.get("hidden_act", "silu") not in ("silu", "swish"):
            fields.reject("hidden_act", 'must be "silu"')
        if isinstance(values.get("auto_map"), dict) and "AutoModelForCausalLM" in values["auto_map"]:
            fields.reject("auto_map", "the model has custom code, which is not run and may differ")
        layer_types = values.get("layer_types", [])
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            fields.reject("layer_types", 'every layer must be "full_attention"')
        for key, why in _MUST_BE_FALSE.items():
            if self.qk_norm and key in ("use_qk_norm", "qk_layernorm") or self.qkv_bias and key == "qkv_bias":
                continue
            if values.get(key, False) is not False:
                fields.reject(key, f"must be false: {why.format(it=self.display_name)}")
        for key, why in _MUST_BE_ABSENT.items():
            # use_sliding_window = false, possibly by default, disables sliding_window.
            used = values.get("use_sliding_window", self.extra.get("use_sliding_window"))
            allowed = key == "sliding_window" and (self.sliding_window or used is False)
            if key in values and not allowed:
                fields.reject(key, f"must be absent or null: {why.format(it=self.display_name)}")
        for key, why in _MUST_BE_ONE.items():
            if values.get(key, 1) != 1:
                fields.reject(key, f"must be 1: {why.format(it=self.display_name)}")

    def _rope(self, fields: Fields, max_seq_len: int) -> tuple[float, Scaling | None]:
        """Read theta and the scaling from either format, with transformers 5's precedence."""
        rope = fields.inner("rope_scaling") or fields.inner("rope_parameters")
        theta = fields.positive("rope_theta", self.rope_theta)
        if rope is None:
            return theta, None
        theta = rope.positive("rope_theta", theta)
        if rope.values.get("partial_rotary_factor", 1) != 1:
            why = _MUST_BE_ONE["partial_rotary_factor"].format(it=self.display_name)
            rope.reject("partial_rotary_factor", f"must be 1: {why}")
        key = "rope_type" if "rope_type" in rope.values else "type"
        kind = rope.values.get(key, "default")
        if kind == "default":
            if any(isinstance(value, dict) for value in rope.values.values()):
                fields.reject(rope.where.rstrip("."), "every layer must have the same RoPE parameters")
            return theta, None
        original = fields.count("original_max_position_embeddings", max_seq_len)
        if kind == "linear":
            return theta, LinearScaling(rope.positive("factor"))
        if kind == "yarn":
            if theta <= 1:
                fields.reject("rope_theta", "must be above 1 for YaRN")
            return theta, _read_yarn(rope, original)
        if kind != "llama3":
            rope.reject(key, 'must be "default", "linear", "yarn" or "llama3"')
            return theta, None
        return theta, RopeScaling(
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_max_seq_len=rope.count("original_max_position_embeddings", original),
        )


def _read_yarn(rope: Fields, original: int) -> YarnScaling:
    factor = rope.positive("factor")
    chosen = rope.positive("attention_factor", 0.0) or None
    mscale, of_all = rope.positive("mscale", 0.0), rope.positive("mscale_all_dim", 0.0)
    if chosen is None and mscale and of_all:
        chosen = yarn_factor(factor, mscale) / yarn_factor(factor, of_all)
    return YarnScaling(
        factor=factor,
        original_max_seq_len=rope.count("original_max_position_embeddings", original),
        beta_fast=rope.positive("beta_fast", YarnScaling.beta_fast),
        beta_slow=rope.positive("beta_slow", YarnScaling.beta_slow),
        attention_factor=chosen,
        truncate=rope.flag("truncate", YarnScaling.truncate),
        mscale_all_dim=of_all,
    )


def _scaling_fields(scaling: Scaling) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"factor": scaling.factor, "rope_type": "linear"}
    fields: dict[str, Any] = {
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
    if isinstance(scaling, YarnScaling):
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "rope_type": "yarn"}
        fields |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
        fields |= {} if scaling.truncate else {"truncate": False}
        fields |= {"mscale_all_dim": scaling.mscale_all_dim} if scaling.mscale_all_dim else {}
    else:
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        fields["rope_type"] = "llama3"
    return dict(sorted(fields.items()))


def generation_config_json(
    *, bos: int | None, eos: int | list[int] | None, pad: int | None
) -> dict[str, Any]:
    """Build the generation_config.json with the BOS, EOS and padding tokens."""
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {key: value for key, value in ids.items() if value is not None}


def _padding(bos: int | None, eos: int | list[int] | None, pad: int | None, *, answers: bool) -> int | None:
    """Return the padding token of a classifier, without which transformers rejects batches of several texts.
    The classifier scores the last token that is not padding. ``answers`` of a reward model end with EOS,
    which is then not padding."""
    ends = eos if isinstance(eos, list) else [eos]
    if answers and bos is not None and (pad is None or pad in ends):
        return bos
    return ends[0] if pad is None else pad
