"""config.json against transformers, which writes the one form, reads both, and knows what a field means."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, GenerationConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from toolkit.errors import DataError
from toolkit.models.common.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling
from toolkit.models.common.hf_config import generation_config_json
from toolkit.models.common.rope import attention_factor, rope_frequencies
from toolkit.models.llama import SPEC
from toolkit.models.llama.args import PRESETS
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import parameter_count

SMALL = ModelArgs(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=100, vocab_size=300, head_dim=32, norm_eps=1e-6,
    rope_theta=5e5, rope_scaling=RopeScaling(32.0, 2.0, 8.0, 1024), max_seq_len=4000, tie_embeddings=True,
)  # fmt: skip
EVERY = {
    f"{name} {flavor}": args for name, flavors in PRESETS.items() for flavor, args in flavors.items()
} | {"every field unlike its default": SMALL}
SCALED = {
    "linear": LinearScaling(4.0),
    "yarn": YarnScaling(4.0, 1000),
    "yarn, every field unlike its default": YarnScaling(8.0, 500, 16.0, 2.0, 1.25, False),
}
EVERY |= {name: replace(SMALL, rope_scaling=scaling) for name, scaling in SCALED.items()}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def as_json(args: ModelArgs = SMALL, **changes: Any) -> dict[str, Any]:
    return SPEC.hf_config().write(args, dtype="bfloat16", bos=1, eos=[2, 3], pad=None) | changes


def without(key: str, args: ModelArgs = SMALL) -> dict[str, Any]:
    return {name: value for name, value in as_json(args).items() if name != key}


@pytest.mark.parametrize("args", EVERY.values(), ids=EVERY)
def test_transformers_reads_what_we_write_and_we_what_it_writes(args: ModelArgs, tmp_path: Path) -> None:
    theirs = AutoConfig.from_pretrained(written(tmp_path, as_json(args)))
    assert isinstance(theirs, LlamaConfig) and theirs.dtype == torch.bfloat16
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, [2, 3], None)
    assert (theirs.hidden_size, theirs.intermediate_size, theirs.vocab_size) == (
        args.dim,
        args.ffn_dim,
        args.vocab_size,
    )
    assert (theirs.head_dim, theirs.tie_word_embeddings) == (args.head_dim, args.tie_embeddings)
    assert (theirs.rms_norm_eps, theirs.max_position_embeddings) == (args.norm_eps, args.max_seq_len)
    rotary = LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(rotary.inv_freq, rope_frequencies(args).float(), rtol=2e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(attention_factor(args), rel=1e-12)

    saved = tmp_path / "saved"
    theirs.save_pretrained(saved)
    assert "rope_parameters" in json.loads((saved / "config.json").read_text()), "the form of transformers 5"
    assert read_hf_config(saved) == args == read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "tie_word_embeddings",
        "hidden_act",
    ],
)
def test_an_absent_field_is_what_it_is_for_transformers(key: str, tmp_path: Path) -> None:
    plain = replace(SMALL, rope_scaling=None)  # for which rope_theta is read without rope_scaling
    args = read_hf_config(written(tmp_path, without(key, plain)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert args == ModelArgs(
        dim=theirs.hidden_size,
        n_layers=theirs.num_hidden_layers,
        n_heads=theirs.num_attention_heads,
        n_kv_heads=theirs.num_key_value_heads,
        ffn_dim=theirs.intermediate_size,
        vocab_size=theirs.vocab_size,
        head_dim=theirs.head_dim,
        norm_eps=theirs.rms_norm_eps,
        rope_theta=theirs.rope_parameters["rope_theta"],
        max_seq_len=theirs.max_position_embeddings,
        tie_embeddings=theirs.tie_word_embeddings,
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
        {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 2e4},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 4e4}},
        {
            "rope_theta": 2e4,
            "rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4},
        },
        {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 3}},
        {"rope_theta": 2e4, "rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 2e4, "beta_fast": None}},
        {
            "rope_theta": 2e4,
            "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.5},
        },
    ],
)
def test_forms_of_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    fields = {key: value for key, value in as_json().items() if not key.startswith("rope")} | rope
    args = read_hf_config(written(tmp_path, fields))
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(rotary.inv_freq, rope_frequencies(args).float(), rtol=2e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(attention_factor(args), rel=1e-12)


PUBLISHED = {
    "TinyLlama 1.1B": (
        1_100_048_384,
        {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 22}
        | {"num_key_value_heads": 4, "vocab_size": 32000, "rope_scaling": None, "rms_norm_eps": 1e-05}
        | {"tie_word_embeddings": False, "max_position_embeddings": 2048, "pretraining_tp": 1},
    ),
    "SmolLM2 135M": (
        134_515_008,
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30}
        | {"num_key_value_heads": 3, "vocab_size": 49152, "rope_scaling": None, "rms_norm_eps": 1e-05}
        | {"tie_word_embeddings": True, "rope_theta": 100000, "rope_interleaved": False}
        | {"is_llama_config": True, "max_position_embeddings": 8192, "attention_bias": False},
    ),
}
"""Others' models of Llama's shape: parameters, and what their config.json says."""


@pytest.mark.parametrize(("parameters", "fields"), PUBLISHED.values(), ids=PUBLISHED)
def test_others_models_of_this_shape(parameters: int, fields: dict[str, Any], tmp_path: Path) -> None:
    fields |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    args = read_hf_config(written(tmp_path, fields))
    assert parameter_count(args) == parameters
    assert args.rope_theta == fields.get("rope_theta", 10000)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (as_json(model_type="gemma2"), "model_type = 'gemma2'"),
        (as_json(model_type="gemma2"), "model_type = 'gemma2'"),
        (as_json(architectures=["LlamaForTokenClassification"]), "architectures"),
        (
            as_json(architectures=["LlamaForSequenceClassification"], problem_type="regression"),
            'problem_type = "regression": must be "single_label_classification"',
        ),
        (
            as_json(architectures=["LlamaForSequenceClassification"], id2label={"0": "one", "2": "two"}),
            "id2label",
        ),
        (as_json(attention_bias=True), "attention_bias = true: must be false"),
        (as_json(mlp_bias=True), "mlp_bias = true: must be false"),
        (as_json(hidden_act="gelu"), 'hidden_act = "gelu": must be "silu"'),
        (as_json(sliding_window=4096), "sliding_window = 4096: must be absent or null"),
        (as_json(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (as_json(layer_types=4), "layer_types = 4"),
        (as_json(rope_theta=float("inf")), "rope_theta = Infinity: must be a positive number"),
        (as_json(rms_norm_eps=float("nan")), "rms_norm_eps = NaN: must be a positive number"),
        (as_json(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (as_json(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), 'rope_scaling.rope_type = "dynamic"'),
        (as_json(rope_scaling={"rope_type": "yarn"}), "rope_scaling.factor is missing"),
        (as_json(rope_scaling={"type": "yarn", "factor": 4}, rope_theta=1.0), "must be above 1 for YaRN"),
        (as_json(rope_scaling={"rope_type": "llama3"}), "rope_scaling.factor is missing"),
        (as_json(rope_scaling=LLAMA3 | {"partial_rotary_factor": 0.5}), "rope_scaling.partial_rotary_factor"),
        (as_json(rope_scaling=4), "rope_scaling = 4: must be an object"),
        (as_json(quantization_config={"bits": 4}), "quantized weights"),
        (as_json(num_local_experts=8), "no mixture of experts"),
        (as_json(auto_map={"AutoModelForCausalLM": "modeling.Own"}), "custom code"),
        (as_json(residual_multiplier=0.2), "residual_multiplier = 0.2: must be 1"),
        (as_json(num_key_value_heads=3), "num_key_value_heads = 3: must divide num_attention_heads"),
        (as_json(head_dim=15), "head_dim = 15: must be even"),
        (as_json(hidden_size="64"), 'hidden_size = "64": must be a positive integer'),
        (as_json(num_hidden_layers=True), "num_hidden_layers = true: must be a positive integer"),
        (as_json(rms_norm_eps=0), "rms_norm_eps = 0: must be a positive number"),
        (as_json(tie_word_embeddings="yes"), 'tie_word_embeddings = "yes": must be true or false'),
        (without("intermediate_size"), "intermediate_size is missing"),
        (without("head_dim") | {"hidden_size": 66}, "hidden_size = 66: must be a multiple"),
    ],
)
def test_what_is_no_llama_is_refused_by_field(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_hf_config(written(tmp_path, fields))
    assert says in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["factor", "x"]), inner),
    max_leaves=4,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*as_json(), "layer_types", "auto_map", "rope_parameters"]), value=ANYTHING)
def test_whatever_a_field_holds_there_is_a_shape_or_a_message(key: str, value: Any, tmp_path: Path) -> None:
    try:
        args = read_hf_config(written(tmp_path, as_json() | {key: value}))
    except DataError as error:
        assert "config.json" in str(error)
    else:
        assert parameter_count(args) > 0 and math.isfinite(rope_frequencies(args).sum())


def test_all_fields_at_fault_are_named_at_once(tmp_path: Path) -> None:
    fields = as_json(attention_bias=True, hidden_act="relu", num_hidden_layers=0)
    with pytest.raises(DataError) as caught:
        read_hf_config(written(tmp_path, fields))
    assert all(name in str(caught.value) for name in ("attention_bias", "hidden_act", "num_hidden_layers"))


@pytest.mark.parametrize(
    ("content", "says"), [("{", "is not JSON"), ("[]", "not contain a JSON object"), (None, "cannot")]
)
def test_a_file_that_is_no_config(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=says):
        read_hf_config(tmp_path)


def test_generation_config(tmp_path: Path) -> None:
    fields = generation_config_json(bos=1, eos=[2, 3], pad=None)
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    theirs = GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, [2, 3], None)
