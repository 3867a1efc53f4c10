"""Rows against transformers: names, shapes, and the order of Meta's weights; FSDP units."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import hf_row_order
from toolkit.models.llama.args import PRESETS
from toolkit.models.parameters import parameter_shapes, table
from toolkit.models.registry import resolve
from toolkit.parallel.fsdp import fsdp_units

LLAMA = table(PRESETS["llama2"]["debugmodel"])


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
    assert {table(args).to_hf(name): shape for name, shape in ours.items()} == expected
    assert [table(args).from_hf(table(args).to_hf(name)) for name in ours] == [[(name, 0)] for name in ours]


def test_rotary_frequencies_are_no_weights() -> None:
    assert LLAMA.from_hf("model.layers.3.self_attn.rotary_emb.inv_freq") == []
    assert LLAMA.from_hf("model.rotary_emb.inv_freq") == []


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
    [(found, _)] = LLAMA.from_hf(name)
    assert found.startswith(name) and found not in LLAMA


def test_no_parameter_of_a_llama_has_no_name_there() -> None:
    with pytest.raises(KeyError):
        LLAMA.to_hf("layers.0.attention.wx.weight")


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 8), (4, 48), (2, 128)])
def test_rows_are_in_the_order_of_transformers_own_conversion(heads: int, head_dim: int) -> None:
    """The rule that convert_llama_weights_to_hf applies to Meta's wq and wk."""
    ours = torch.arange(heads * head_dim)
    theirs = ours.view(heads, head_dim // 2, 2).transpose(1, 2).flatten()
    rows = range(heads * head_dim)
    assert hf_row_order(rows, head_dim) == theirs.tolist()
    assert hf_row_order(rows[1:], head_dim) == theirs[1:].tolist()


def test_only_queries_and_keys_are_reordered() -> None:
    chosen = {name.split(".")[3] for name, row in LLAMA.items() if row.rotary}
    assert chosen == {"wq", "wk"}


def build(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(resolve(name, "debugmodel", n_layers=3))


def owned(units) -> list[torch.nn.Parameter]:
    return [p for unit in units for module in unit for p in module.parameters()]


def test_units_hold_every_parameter_once_in_forward_order():
    model = build("llama3.1")
    units = fsdp_units(model)
    blocks = list(model.layers.values())
    assert units == [[model.tok_embeddings], *[[block] for block in blocks], [model.norm, model.output]]
    assert [id(p) for p in owned(units)] == [id(p) for p in model.parameters()]


def test_a_tied_embedding_and_the_last_norm_are_left_to_the_root():
    model = build("llama3.2")
    held = {id(p) for p in owned(fsdp_units(model))}
    left = {name for name, p in model.named_parameters() if id(p) not in held}
    assert left == {"tok_embeddings.weight", "norm.weight"}


def test_a_stage_without_embedding_or_head_has_units_for_the_rest():
    model = build("llama3.1")
    model.tok_embeddings = model.norm = model.output = None
    assert fsdp_units(model) == [[block] for block in model.layers.values()]
