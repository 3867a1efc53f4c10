"""Which modules the wrap policies choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.models.small_llama import small
from toolkit.config.finetune import LoRA
from toolkit.config.parallelism import Parallelism
from toolkit.finetune.lora import LoRALinear
from toolkit.models.common.args import INNER_CLASSES, WRAP_CLASSES, ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.fsdp_wrap import modules_of_size, wrapped_units

UNTIED, TIED = small("llama3.1", n_layers=2), small("llama3.2", n_layers=2)


def build(args: ModelArgs) -> Decoder:
    with torch.device("meta"):
        return Decoder(args)


def by_class(*classes: str) -> Parallelism:
    return Parallelism(fsdp_wrap_policy="class", fsdp_wrap_classes=list(classes))


def by_size(min_params: int) -> Parallelism:
    return Parallelism(fsdp_wrap_policy="size", fsdp_min_num_params=min_params)


def names(model: nn.Module, units: list[list[nn.Module]]) -> list[str]:
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[unit] for (unit,) in units]


def test_the_classes_are_those_of_the_model():
    model = build(UNTIED)
    with_parameters = {type(m).__name__ for m in model.modules() if next(m.parameters(), None) is not None}
    assert with_parameters - {"Decoder", "ModuleDict"} == set(WRAP_CLASSES)
    inside = {type(m).__name__ for m in model.layers["0"].modules()} - {"TransformerBlock"}
    assert inside == set(INNER_CLASSES)


def test_modules_of_a_class_come_in_forward_order_and_outer_before_inner():
    model = build(UNTIED)
    classes = ("FeedForward", "OutputHead", "TransformerBlock", "Embedding")
    assert names(model, wrapped_units(model, by_class(*classes))) == [
        "tok_embeddings",
        "layers.0",
        "layers.0.feed_forward",
        "layers.1",
        "layers.1.feed_forward",
        "output",
    ]


def test_a_tied_embedding_stays_in_the_root():
    model = build(TIED)
    everything = wrapped_units(model, by_class(*WRAP_CLASSES))
    assert "tok_embeddings" not in names(model, everything) and "output" not in names(model, everything)
    assert "tok_embeddings" not in names(model, wrapped_units(model, by_size(1)))


@pytest.mark.parametrize("policy", [by_class("TransformerBlock"), by_size(50_000)])
def test_a_wrapped_module_is_a_unit_with_its_wrapper(policy: Parallelism):
    model = build(UNTIED)
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    model.layers["1"] = checkpoint_wrapper(torch.compile(model.layers["1"]))
    units = [unit for (unit,) in wrapped_units(model, policy)]
    assert units == [model.layers["0"], model.layers["1"]]


def test_units_have_the_size_of_what_is_in_no_smaller_one():
    # Linears of 64 × 256 (wq, wo) and 64 × 96 (w1, w2, w3); the keys and values have 64 × 64.
    model = build(UNTIED)
    linear = names(model, wrapped_units(model, by_size(64 * 256)))
    # Each block keeps 2 · 4,096 of its attention and 18,432 of its feed-forward, the latter a unit by itself.
    assert linear[:5] == [
        "tok_embeddings",
        "layers.0.attention.wq",
        "layers.0.attention.wo",
        "layers.0.feed_forward",
        "layers.1.attention.wq",
    ]
    # Attention has 40,960: with one parameter more asked for, it and the 18,432 join in the block.
    assert "layers.0.attention" in names(model, wrapped_units(model, by_size(40_960)))
    whole = names(model, wrapped_units(model, by_size(40_961)))
    assert whole == ["layers.0", "layers.1"]
    assert wrapped_units(model, by_size(10**6)) == []


class _Stack(nn.Module):
    """A list larger than the threshold, whose parts are smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(10, 10, bias=False) for _ in range(4)])
        self.named = nn.ModuleDict({"a": nn.Linear(10, 30, bias=False)})


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = _Stack()
        self.tail = nn.Linear(10, 5, bias=False)


def test_lists_and_dicts_are_never_units_but_what_holds_them_is():
    # In 200 parameters: none of the parts (100), the one in the dict (300), the stack for the other 400.
    model = _Around()
    units = modules_of_size(model, 200)
    assert units == [model.stack, model.stack.named["a"]]


def test_sizes_agree_with_fsdp1():
    # What FSDP1 would wrap, by its own recursion with a wrapper that does nothing but to remember.
    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    for min_params in (1, 64, 4_096, 6_144, 16_384, 18_432, 40_960, 40_961, 59_520, 59_521):
        model = build(UNTIED)
        by_module = {module: name for name, module in model.named_modules()}
        wrapped: list[nn.Module] = []

        class Remember(nn.Module):
            def __init__(self, module: nn.Module, remembered: list[nn.Module] = wrapped):
                super().__init__()
                self.module = module
                remembered.append(module)

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, least: int = min_params) -> bool:
            return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=least)

        ours = names(model, wrapped_units(model, by_size(min_params)))
        _recursive_wrap(model, policy, Remember, set(), set(), only_wrap_children=True)
        theirs = {by_module[module] for module in wrapped}
        assert set(ours) == theirs, min_params


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_layer_of_lora_may_be_a_unit(use_dora: bool):
    layer = LoRALinear(nn.Linear(4, 6), LoRA(rank=2, use_dora=use_dora))
    assert not layer(torch.ones(2, 3, 4))._is_view(), "FSDP warns of views that a unit returns"
