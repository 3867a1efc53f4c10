"""Hugging Face's config.json, as transformers 4 and 5 write it, and our shape of it. No torch.

transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes rope_parameters and
dtype and still reads the older form, which is therefore what we write. A field that is absent has the
value that transformers' class of the family gives it; a size that is absent is refused all the same. What
would compute something else is refused, field by field, never ignored, save attention_dropout: that is of
training alone, whose preflight tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_LAYERS
from toolkit.io.json_fields import Fields, check_heads
from toolkit.models.common.args import Classifier, ModelArgs, RopeScaling

GENERATION_CONFIG = "generation_config.json"
_ONE_LABEL = "single_label_classification"

_MUST_BE_FALSE = {
    "attention_bias": "the output projection of {it} has no bias",
    "mlp_bias": "the feed-forward of {it} has no bias",
    "bias": "the output projection of {it} has no bias",
    "qkv_bias": "queries, keys and values of {it} have no bias",
    "use_qk_norm": "{it} does not normalise queries and keys",
    "qk_layernorm": "{it} does not normalise queries and keys",
    "use_sliding_window": "layers of {it} are not switched to windows here",
    "is_encoder_decoder": "{it} is a decoder alone",
    "add_cross_attention": "{it} is a decoder alone",
}
_MUST_BE_ABSENT = {
    "sliding_window": "{it} attends to all earlier tokens",
    "attention_chunk_size": "{it} attends to all earlier tokens",
    "attn_logit_softcapping": "{it} does not cap its attention",
    "final_logit_softcapping": "{it} does not cap its logits",
    "no_rope_layers": "every layer of {it} rotates its queries and keys",
    "num_experts": "mixtures of experts are not supported",
    "num_local_experts": "mixtures of experts are not supported",
    "quantization_config": "quantised weights are not supported: take the model they were made from",
}
_MUST_BE_ONE = {
    "partial_rotary_factor": "{it} rotates the whole head",
    "attention_multiplier": "{it} scales nothing",
    "embedding_multiplier": "{it} scales nothing",
    "logits_scaling": "{it} scales nothing",
    "residual_multiplier": "{it} scales nothing",
}


@dataclass(frozen=True)
class HFConfig:
    """The config.json of a family: how it names itself, and what an absent field means there.

    Attributes:
        called: the family in messages, such as "a Llama".
        head_dim: where the file does not say it; None is ``hidden_size / num_attention_heads``.
        n_kv_heads: where the file does not say it; None, and null in the file, is ``num_attention_heads``.
        sliding_window: where the file does not say it, since null says that there is none; None is a family
            without windows.
        extra: fields beside those that all families have, when it is written.
    """

    model_type: str
    architecture: str
    called: str
    max_seq_len: int
    head_dim: int | None = None
    n_kv_heads: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    sliding_window: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def read(self, values: dict[str, Any], path: Path) -> ModelArgs:
        """Read the shape of the model from the ``values`` of the config.json at ``path``.

        Raises:
            DataError: it is not of this family, or of a model of it that is not supported; every field at
                fault is named.
        """
        fields = Fields(values)
        self._refuse_other_models(fields)
        dim, n_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        default = values.get("num_key_value_heads", self.n_kv_heads) or n_heads
        n_kv_heads = fields.count("num_key_value_heads", default)
        max_seq_len = fields.count("max_position_embeddings", self.max_seq_len)
        theta, scaling = self._rope(fields, max_seq_len)
        if "head_dim" not in fields.values and not self.head_dim and dim % n_heads:
            fields.refuse("hidden_size", f"must be a multiple of num_attention_heads, which is {n_heads}")
        args = ModelArgs(
            dim=dim,
            n_layers=fields.count("num_hidden_layers", at_most=MAX_LAYERS),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            ffn_dim=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            head_dim=fields.count("head_dim", self.head_dim or max(1, dim // n_heads)),
            norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_seq_len=max_seq_len,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            sliding_window=self._window(fields, values),
            family=self.model_type,
            classifier=self._classifier(fields),
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
        if args.head_dim % 2 and not fields.wrong:
            fields.refuse("head_dim", f"must be even, since RoPE turns pairs, and it is {args.head_dim}")
        fields.finish(f"{path} is not of {self.called} that can be read")
        return args

    def write(
        self, args: ModelArgs, *, dtype: str, bos: int | None, eos: int | list[int] | None, pad: int | None
    ) -> dict[str, Any]:
        """Build the config.json of a model, as transformers 4 and 5 read it; its weights are of ``dtype``."""
        scaling, classifier = args.rope_scaling, args.classifier
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
            "rope_scaling": None
            if scaling is None
            else {
                "factor": scaling.factor,
                "high_freq_factor": scaling.high_freq_factor,
                "low_freq_factor": scaling.low_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "rope_type": "llama3",
            },
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
                "problem_type": _ONE_LABEL,
                # transformers refuses several texts at once of a model without one.
                "pad_token_id": pad if pad is not None else eos[0] if isinstance(eos, list) else eos,
            }
        if self.sliding_window:
            fields["sliding_window"] = args.sliding_window
        return dict(sorted({**fields, **self.extra}.items()))

    @property
    def classifier(self) -> str:
        """transformers' class with a classifier's head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    def _window(self, fields: Fields, values: Mapping[str, Any]) -> int | None:
        if not self.sliding_window or values.get("sliding_window", 0) is None:
            return None
        return fields.count("sliding_window", self.sliding_window)

    def _classifier(self, fields: Fields) -> Classifier | None:
        if fields.values.get("architectures") != [self.classifier]:
            return None
        if fields.values.get("problem_type", _ONE_LABEL) != _ONE_LABEL:
            fields.refuse("problem_type", f'must be "{_ONE_LABEL}"')
        labels = fields.values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        numbered = [str(index) for index in range(len(labels))] if isinstance(labels, dict) else []
        if len(numbered) < 2 or labels.keys() != set(numbered):
            fields.refuse("id2label", "must have a name for each of 0, 1 and so on")
            return None
        return Classifier(tuple(str(labels[index]) for index in numbered))

    def _refuse_other_models(self, fields: Fields) -> None:
        values = fields.values
        architectures = values.get("architectures", [self.architecture])
        if architectures not in ([self.architecture], [self.classifier]):
            fields.refuse("architectures", f'must be ["{self.architecture}"] or ["{self.classifier}"]')
        if values.get("hidden_act", "silu") not in ("silu", "swish"):
            fields.refuse("hidden_act", 'must be "silu"')
        if isinstance(values.get("auto_map"), dict) and "AutoModelForCausalLM" in values["auto_map"]:
            fields.refuse("auto_map", "the model brings code of its own, which is not run and may differ")
        kinds = values.get("layer_types", [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            fields.refuse("layer_types", 'every layer must be "full_attention"')
        for key, why in _MUST_BE_FALSE.items():
            if self.qk_norm and key in ("use_qk_norm", "qk_layernorm") or self.qkv_bias and key == "qkv_bias":
                continue
            if values.get(key, False) is not False:
                fields.refuse(key, f"must be false: {why.format(it=self.called)}")
        for key, why in _MUST_BE_ABSENT.items():
            # Beside use_sliding_window = false, which may be the default, it says nothing.
            used = values.get("use_sliding_window", self.extra.get("use_sliding_window"))
            fine = key == "sliding_window" and (self.sliding_window or used is False)
            if key in values and not fine:
                fields.refuse(key, f"must be absent or null: {why.format(it=self.called)}")
        for key, why in _MUST_BE_ONE.items():
            if values.get(key, 1) != 1:
                fields.refuse(key, f"must be 1: {why.format(it=self.called)}")

    def _rope(self, fields: Fields, max_seq_len: int) -> tuple[float, RopeScaling | None]:
        """The base of the frequencies and their scaling, from either form, in the order of transformers 5."""
        rope = fields.inner("rope_scaling") or fields.inner("rope_parameters")
        theta = fields.positive("rope_theta", 10000.0)
        if rope is None:
            return theta, None
        theta = rope.positive("rope_theta", theta)
        if rope.values.get("partial_rotary_factor", 1) != 1:
            rope.refuse("partial_rotary_factor", f"must be 1: {self.called} rotates the whole head")
        key = "rope_type" if "rope_type" in rope.values else "type"
        kind = rope.values.get(key, "default")
        if kind == "default":
            if any(isinstance(value, dict) for value in rope.values.values()):
                fields.refuse(rope.where.rstrip("."), "every layer must have the same rotary positions")
            return theta, None
        if kind != "llama3":
            rope.refuse(key, 'must be "default" or "llama3"')
            return theta, None
        original = fields.count("original_max_position_embeddings", max_seq_len)
        return theta, RopeScaling(
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_max_seq_len=rope.count("original_max_position_embeddings", original),
        )


def generation_config_json(
    *, bos: int | None, eos: int | list[int] | None, pad: int | None
) -> dict[str, Any]:
    """The generation_config.json beside it: the tokens that begin, end and fill a text."""
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    return {key: value for key, value in ids.items() if value is not None}
