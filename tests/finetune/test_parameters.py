"""Trainable counts of published sizes, and names and shapes of the model that is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.config.finetune import Finetune
from toolkit.errors import ConfigError
from toolkit.finetune.apply import apply_finetune
from toolkit.finetune.parameters import added_shapes, all_shapes, is_added, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve

_7B, _8B = ("llama2", "7B"), ("llama3.1", "8B")
_70B, _1B, _3B = ("llama3.1", "70B"), ("llama3.2", "1B"), ("llama3.2", "3B")
LORA = {"adapter": "lora"}
ALL_LINEAR = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
PREFIX = {"adapter": "prefix_tuning"}
ADAPTER = {"adapter": "llama_adapter", "llama_adapter": {"gate": "layer"}}
COUNTS = [
    (_7B, LORA, 4_194_304),
    (_8B, LORA, 3_407_872),
    (_70B, LORA, 16_384_000),
    (_1B, LORA, 851_968),
    (_3B, LORA, 2_293_760),
    (_8B, ALL_LINEAR, 20_971_520),
    (_1B, ALL_LINEAR, 5_636_096),
    (_7B, PREFIX, 7_864_320),
    (_8B, PREFIX, 1_966_080),
    (_1B, PREFIX, 491_520),
    (_3B, PREFIX, 1_720_320),
    (_7B, ADAPTER, 1_228_830),
    (_8B, ADAPTER, 1_228_830),
]


def built(args: ModelArgs, options: Finetune) -> Decoder:
    with torch.device("meta"):
        model = Decoder(args)
    apply_finetune(model, options, frozen_dtype=torch.bfloat16)
    return model


@pytest.mark.parametrize(("model", "values", "count"), COUNTS)
def test_trainable_counts_are_the_published_ones(model: tuple[str, str], values: dict, count: int) -> None:
    options = Finetune.model_validate(values)
    trained = [it for it in built(resolve(*model), options).parameters() if it.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == count


@pytest.mark.parametrize(
    "values",
    [
        ALL_LINEAR,
        {"adapter": "lora", "lora": {"target_modules": ["q_proj", "layers.1.*"], "use_dora": True}},
        {"adapter": "lora", "lora": {"target_modules": ["w2"]}, "trainable": ["*norm.weight"]},
        PREFIX,
        {"adapter": "llama_adapter", "llama_adapter": {"adapter_layers": 2}},
        {"freeze_first_layers": 2, "frozen": ["output.weight"]},
        {"freeze_last_layers": 6, "trainable": ["layers.*", "norm.weight"]},
    ],
)
def test_names_and_shapes_are_those_of_the_model(values: dict) -> None:
    args, options = resolve("llama3", "debugmodel"), Finetune.model_validate(values)
    named = dict(built(args, options).named_parameters())
    assert {name: tuple(it.shape) for name, it in named.items()} == all_shapes(args, options)
    assert {name for name in named if is_added(name)} == added_shapes(args, options).keys()
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trained == trained_names(named, args, options)
    assert trained


def test_what_the_patterns_choose() -> None:
    args = resolve("llama3", "debugmodel")  # six blocks

    def trained(**values: object) -> set[str]:
        options = Finetune.model_validate(values)
        return trained_names(all_shapes(args, options), args, options)

    first = trained(freeze_first_layers=5)
    assert {name.split(".")[1] for name in first if name.startswith("layers.")} == {"5"}
    assert {"norm.weight", "output.weight"} < first and "tok_embeddings.weight" not in first
    last = trained(freeze_last_layers=5)
    assert {name.split(".")[1] for name in last if name.startswith("layers.")} == {"0"}
    assert "tok_embeddings.weight" in last
    norms = trained(trainable=["*norm.weight"], frozen=["norm.weight"])
    assert norms == {f"layers.{i}.{part}_norm.weight" for i in range(6) for part in ("attention", "ffn")}
    with_lora = trained(adapter="lora", trainable=["tok_embeddings.weight"])
    assert {name for name in with_lora if not is_added(name)} == {"tok_embeddings.weight"}
    assert len(with_lora) == 1 + 2 * 2 * 6


class Own(nn.Linear):
    """A layer of a family's that computes otherwise."""


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (ALL_LINEAR, r"finetune.lora.target_modules = \['all-linear'\]"),
        ({"adapter": "lora", "lora": {"quantize_base": "nf4"}}, "finetune.lora.quantize_base = 'nf4'"),
    ],
)
def test_a_layer_that_is_no_plain_one_is_not_replaced(values: dict, key: str) -> None:
    with torch.device("meta"):
        model = Decoder(args := resolve("llama3", "debugmodel"))
        model.layers["1"].feed_forward.w2 = Own(args.ffn_dim, args.dim, bias=False)
    with pytest.raises(ConfigError, match=f"{key}\n  rule: layers.1.feed_forward.w2 is a Own, and only"):
        apply_finetune(model, Finetune.model_validate(values), frozen_dtype=torch.bfloat16)


@pytest.mark.parametrize("values", [LORA, PREFIX, ADAPTER])
def test_an_adapter_is_of_the_precision_of_the_model(values: dict) -> None:
    with torch.device("meta"):
        model = Decoder(resolve("llama3", "debugmodel")).double()
    apply_finetune(model, Finetune.model_validate(values), frozen_dtype=torch.float32)
    assert {it.dtype for it in model.parameters() if it.requires_grad} == {torch.float64}


def test_an_adapter_keeps_the_frozen_model_in_the_precision_of_the_computation() -> None:
    model = built(resolve("llama3", "debugmodel"), Finetune.model_validate(LORA))
    kinds = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert kinds == {torch.bfloat16}
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    partly = built(resolve("llama3", "debugmodel"), Finetune(freeze_first_layers=1))
    assert {parameter.dtype for parameter in partly.parameters()} == {torch.float32}
