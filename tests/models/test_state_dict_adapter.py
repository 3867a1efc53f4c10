"""Names and the order of rows against transformers: its modules, and its own rule for Meta's weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameters import parameter_names, parameter_shapes
from toolkit.models.common.state_dict_adapter import hf_row_order
from toolkit.models.llama.args import PRESETS
from toolkit.models.llama.state_dict_adapter import ADAPTER
from toolkit.models.registry import resolve


@pytest.mark.parametrize("name", ["llama3.1", "llama3.2"])
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    args = resolve(name, "debugmodel", n_layers=11, n_kv_heads=4)  # two digits
    with torch.device("meta"):
        theirs = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=args.dim,
                intermediate_size=args.ffn_dim,
                num_hidden_layers=args.n_layers,
                num_attention_heads=args.n_heads,
                num_key_value_heads=args.n_kv_heads,
                vocab_size=args.vocab_size,
                tie_word_embeddings=args.tie_embeddings,
            )
        )
        ours = {name: tuple(parameter.shape) for name, parameter in Decoder(args).named_parameters()}
    assert parameter_shapes(args) == ours
    expected = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    assert {ADAPTER.to_hf(name): shape for name, shape in ours.items()} == expected
    assert [ADAPTER.from_hf(ADAPTER.to_hf(name)) for name in ours] == list(ours)


def test_rotary_frequencies_are_no_weights() -> None:
    assert ADAPTER.from_hf("model.layers.3.self_attn.rotary_emb.inv_freq") is None
    assert ADAPTER.from_hf("model.rotary_emb.inv_freq") is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0",
        "model.layers.0.self_attn.q_proj",
        "lm_head",
        "score.weight",
        "transformer.wte.weight",
        "norm.weight",
        "layers.0.attention.wq.weight",
    ],
)
def test_a_name_that_no_llama_has_there_is_none_of_ours(name: str) -> None:
    found = ADAPTER.from_hf(name)
    assert found is not None and found.startswith(name)
    assert found not in parameter_names(PRESETS["llama2"]["debugmodel"])


def test_no_parameter_of_a_llama_has_no_name_there() -> None:
    with pytest.raises(KeyError):
        ADAPTER.to_hf("layers.0.attention.wx.weight")


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 8), (4, 48), (2, 128)])
def test_rows_are_in_the_order_of_transformers_own_conversion(heads: int, head_dim: int) -> None:
    """The rule that convert_llama_weights_to_hf applies to Meta's wq and wk."""
    ours = torch.arange(heads * head_dim)
    theirs = ours.view(heads, head_dim // 2, 2).transpose(1, 2).flatten()
    rows = range(heads * head_dim)
    assert hf_row_order(rows, head_dim) == theirs.tolist()
    assert hf_row_order(rows[1:], head_dim) == theirs[1:].tolist()


def test_only_queries_and_keys_are_reordered() -> None:
    names = parameter_names(PRESETS["llama2"]["debugmodel"])
    chosen = {name.split(".")[3] for name in names if ADAPTER.reorders_rows(name)}
    assert chosen == {"wq", "wk"}
