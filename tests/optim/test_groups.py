"""Learning rates and weight decays of parameters by name, and their use by every optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.finetune.adapters import ARGS
from tests.models.small_llama import build
from toolkit.config import Config
from toolkit.config.finetune import Finetune
from toolkit.config.optimizer import Optimizer
from toolkit.finetune.parameters import added_shapes
from toolkit.optim.groups import parameter_options, summaries
from toolkit.optim.optimizer import build_optimizer, set_learning_rate

GROUPS: dict[str, Any] = {
    "ends": {"params": ["tok_embeddings.*", "output.*"], "lr": 1e-4},
    "norms": {"params": ["*norm.weight"], "lr": 2e-3, "weight_decay": 0.0},
    "head": {"params": ["output.*", "layers.1.*"], "weight_decay": 0.5},
    "plain": {"params": ["layers.2.*.weight"], "name": "AdamW"},
}


def _options(**options: Any) -> Optimizer:
    return Optimizer.model_validate({"lr": 1e-3, "weight_decay": 0.1, **options})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("output.weight", ("ends", 0.1, 0.1, False)),
        ("layers.1.ffn_norm.weight", ("norms", 2.0, 0.0, False)),
        ("layers.1.attention.wq.weight", ("head", 1.0, 0.5, False)),
        ("layers.1.attention.wo.weight", ("head", 1.0, 0.0, False)),
        ("layers.0.attention.wq.weight", ("*", 1.0, 0.1, False)),
        ("layers.2.attention.wq.weight", ("plain", 1.0, 0.1, True)),
    ],
)
def test_the_first_match_wins_and_no_decay_holds_in_groups(
    name: str, expected: tuple[str, float, float, bool]
):
    options = _options(groups=GROUPS, no_decay=["*.wo.weight"])
    assert parameter_options(name, options, None) == pytest.approx(expected)


def test_layer_decay_is_that_of_beit():
    """get_num_layer_for_vit of microsoft/unilm: embedding 0, blocks from 1, head n + 1."""
    names = {"tok_embeddings.weight": 0, "layers.0.attention.wq.weight": 1, "layers.11.ffn_norm.weight": 12,
             "norm.weight": 13, "output.weight": 13}  # fmt: skip
    for name, layer in names.items():
        found = parameter_options(name, _options(layer_lr_decay=0.8), 12)
        assert found.lr_ratio == pytest.approx(0.8 ** (13 - layer))
    both = _options(layer_lr_decay=0.8, groups=GROUPS)
    assert parameter_options("tok_embeddings.weight", both, 12).lr_ratio == pytest.approx(0.1 * 0.8**13)
    with pytest.raises(ValueError, match=r"model\.n_layers"):
        parameter_options("output.weight", _options(layer_lr_decay=0.8), None)


def test_lora_plus_groups_are_those_of_peft():
    peft, optimizers = pytest.importorskip("peft"), pytest.importorskip("peft.optimizers")
    from tests.models.test_transformers import theirs

    kinds = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs(build(ARGS, torch.float32)), kinds)
    made = optimizers.create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1, weight_decay=0.1
    )
    shape_of_rate: dict[tuple[int, ...], set[float]] = {}
    for group in made.param_groups:
        for parameter in group["params"]:
            shape_of_rate.setdefault(tuple(parameter.shape), set()).add(group["lr"])
    options = _options(loraplus_lr_ratio=16.0)
    lora = {"rank": 4, "target_modules": ["wq", "w2"]}
    shapes = added_shapes(ARGS, Finetune.model_validate({"adapter": "lora", "lora": lora}))
    ours: dict[tuple[int, ...], set[float]] = {}
    for name, shape in shapes.items():
        ours.setdefault(shape, set()).add(1e-3 * parameter_options(name, options, None).lr_ratio)
    assert ours == shape_of_rate and {rate for rates in ours.values() for rate in rates} == {1e-3, 0.016}


def _named(dtype: torch.dtype = torch.float64) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    names = (
        "tok_embeddings.weight",
        "layers.0.attention.wq.weight",
        "layers.1.ffn_norm.weight",
        "layers.2.attention.wq.weight",
        "output.weight",
    )
    return [(name, nn.Parameter(torch.randn(16, 256, dtype=dtype))) for name in names]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "AdamW8bit", "Muon"])
def test_each_parameter_is_updated_as_by_an_optimizer_of_its_own(name: str, early: bool):
    """At a rate that changes: bit for bit what an optimizer with this rate and decay makes of it alone."""
    if early and name == "Muon":
        pytest.skip("rejected by the preflight")
    table = {"name": name, "groups": GROUPS, "layer_lr_decay": 0.5, "implementation": "for-loop"}
    options = _options(**table)
    named = _named()
    config = Config(optimizer=options.model_copy(update={"early_step_in_backward": early}))
    optimizer = build_optimizer(named, config, n_layers=3)
    alone = []
    for key, parameter in _named():
        _, ratio, decay, adamw = parameter_options(key, options, 3)
        own = _options(
            name="AdamW" if adamw and name != "Adam" else name,
            implementation="for-loop",
            lr=1e-3 * ratio,
            weight_decay=decay,
        )
        alone.append((parameter, build_optimizer([(key, parameter)], Config(optimizer=own)), ratio))
    for rate in (1e-3, 5e-4):
        set_learning_rate(optimizer, rate)
        torch.manual_seed(1)
        factors = [torch.randn_like(parameter) for _, parameter in named]
        sum((p * f).sum() for (_, p), f in zip(named, factors, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for (parameter, own, ratio), factor in zip(alone, factors, strict=True):
            parameter.grad = factor.clone()
            for group in own.param_groups:
                group["lr"] = rate * ratio
            own.step()
    for (key, parameter), (expected, _, _) in zip(named, alone, strict=True):
        assert torch.equal(parameter, expected), key


def test_a_line_per_group():
    sizes = {name: parameter.numel() for name, parameter in _named()}
    found = list(summaries(sizes, _options(groups=GROUPS, layer_lr_decay=0.5), 3))
    assert [it.describe(1e-3) for it in found] == [
        "optimizer group ends: 8,192 elements, lr 6.25e-06 to 0.0001, weight decay 0.1",
        "optimizer group *: 4,096 elements, lr 0.000125, weight decay 0.1",
        "optimizer group norms: 4,096 elements, lr 0.0005, weight decay 0",
        "optimizer group plain: 4,096 elements, lr 0.0005, weight decay 0.1, by AdamW",
    ]
    assert [it.metric for it in found] == ["lr/ends", "lr", "lr/norms", "lr/plain"]
