"""Losses, optimizers, converters and datasets of a user's module that are not what they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.preflight.bad_weights import write_model
from toolkit.build import build_model
from toolkit.config import Config
from toolkit.config.job import Checkpoint
from toolkit.config.optimizer import Optimizer, ParameterGroup
from toolkit.config.schema import registry
from toolkit.config.training import Loss, Model
from toolkit.data.sources import open_corpus
from toolkit.errors import ConfigError, DataError
from toolkit.generation.load import load_model
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.loss_terms import training_losses
from toolkit.models.common.rms_norm import RMSNorm
from toolkit.models.registry import resolve, spec
from toolkit.optim.optimizer import build_optimizer, parameter_groups
from toolkit.optim.update_ahead import can_update_ahead
from toolkit.parallel.converters import Converters


def losses(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="none")


WRONG_LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    r"returns \(\) for labels of \(8,\)": lambda logits, labels: losses(logits, labels).mean(),
    r"returns \(8, 1\) for labels of \(8,\)": lambda logits, labels: losses(logits, labels)[:, None],
    "returns torch.bfloat16": lambda logits, labels: losses(logits, labels).bfloat16(),
    "returns None, not a tensor": lambda logits, labels: None,
    "returns losses without a gradient": lambda logits, labels: losses(logits, labels).detach(),
}


def loss_of(monkeypatch: pytest.MonkeyPatch, made: Any) -> Any:
    monkeypatch.setitem(registry("loss.name"), "mine", lambda config: made)
    return training_losses(Config().model_copy(update={"loss": Loss.model_construct(name="mine")}))


@pytest.mark.parametrize(("said", "wrong"), WRONG_LOSSES.items())
def test_a_loss_that_is_not_one_for_each_token(
    said: str, wrong: Callable[[Tensor, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = torch.randn(8, 16, requires_grad=True), torch.arange(8)
    with pytest.raises(ConfigError, match=rf"test_registered.py:\d+: {said}"):
        loss_of(monkeypatch, wrong)(logits, labels)
    assert torch.equal(loss_of(monkeypatch, losses)(logits, labels), losses(logits, labels))


def test_a_build_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="build returns None, not a function"):
        loss_of(monkeypatch, None)


class Counting(SGD):
    """Momentum, and what else a test adds, of a parameter or ``in_groups``."""

    def __init__(self, parameters: Any, fresh: Any, kept: Any = None, in_groups: Any = lambda group: {}):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.kept, self.in_groups = kept or {}, in_groups
        self.fresh_state = lambda parameter, group: fresh

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state.update(self.kept)
        for group in self.param_groups:
            group.update(self.in_groups(group))


BUFFER = {"momentum_buffer": torch.zeros(3)}
WRONG_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "returns None, not a torch.optim.Optimizer": lambda named: None,
    "omits second, which require": lambda named: SGD([named[0][1]], lr=1),
    r"no method fresh_state": lambda named: SGD(named, lr=1),
    r"is a list": lambda named: Counting(named, [1]),
    r"but is momentum_buffer of Tensor, count of int": lambda named: Counting(named, BUFFER, {"count": 3}),
    r"returns \[\], but a step creates \['momentum_buffer'\]": lambda named: Counting(named, {}),
    r"gives momentum_buffer the shape \(\), but after a step it has \(3,\)": lambda named: Counting(
        named, {"momentum_buffer": torch.zeros(())}
    ),
}
IN_GROUPS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "steps": lambda group: {"steps": group.get("steps", 0) + 1},
    "momentum": lambda group: {"momentum": group["momentum"] / 2},
    "seen": lambda group: {"seen": group.get("seen", torch.zeros(2)) + 1},
}


def take_step(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[Any], Any], enable: bool = True, early: bool = False
) -> None:
    monkeypatch.setitem(registry("optimizer.name"), "Mine", lambda named, config: build(list(named)))
    options = Optimizer.model_construct(name="Mine", early_step_in_backward=early)
    changed = {"optimizer": options, "checkpoint": Checkpoint(enable=enable)}
    named = [(name, nn.Parameter(torch.ones(3))) for name in ("first", "second")]
    optimizer = build_optimizer(named, Config().model_copy(update=changed))
    for _, parameter in named:
        parameter.grad = None if early else torch.ones(3)
        if early:
            parameter.sum().backward()
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize(("said", "build"), WRONG_OPTIMIZERS.items())
def test_an_optimizer_that_checkpoints_could_not_hold(
    said: str, build: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        take_step(monkeypatch, build)


@pytest.mark.parametrize("takes_groups", [False, True])
def test_an_optimizer_that_ignores_groups(takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(named: Any, config: Config) -> torch.optim.Optimizer:
        return SGD(parameter_groups(named, config) if takes_groups else [it for _, it in named])

    monkeypatch.setitem(registry("optimizer.name"), "Mine", build)
    groups = {"one": ParameterGroup(params=["first"], lr=0.1)}
    options = Optimizer.model_construct(name="Mine", groups=groups)
    named = [(name, nn.Parameter(torch.ones(3))) for name in ("first", "second")]
    config = Config().model_copy(update={"optimizer": options, "checkpoint": Checkpoint()})
    if takes_groups:
        assert [it["lr_ratio"] for it in build_optimizer(named, config).param_groups] == [125.0, 1.0]
    else:
        with pytest.raises(ConfigError, match=r"ignores optimizer\.groups"):
            build_optimizer(named, config)


@pytest.mark.parametrize(("enable", "early"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_an_optimizer_that_keeps_something_in_its_groups(
    name: str, enable: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no checkpoint, and would count parameters for steps where each is updated by itself."""
    keep = IN_GROUPS[name]
    with pytest.raises(ConfigError, match=f"its step changes {name} of a parameter group"):
        take_step(monkeypatch, lambda named: Counting(named, BUFFER, in_groups=keep), enable, early)
    take_step(monkeypatch, lambda named: Counting(named, BUFFER, in_groups=keep), enable=False)


def test_optimizers_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    take_step(monkeypatch, lambda named: Counting(named, BUFFER))
    take_step(monkeypatch, lambda named: Counting(named, BUFFER, in_groups=lambda group: {"lr": 0.5}))
    take_step(monkeypatch, lambda named: Counting(named, BUFFER), enable=False, early=True)
    take_step(monkeypatch, lambda named: Adam(named))
    take_step(monkeypatch, lambda named: SGD(named, lr=1), enable=False)


class Bounded(AdamW):
    """AdamW that bounds gradients itself."""


def test_only_torchs_own_classes_are_given_gradients_before_they_are_clipped() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    made = [kind(parameters, lr=0.1, fused=True) for kind in (AdamW, SGD, Bounded)]
    assert [can_update_ahead(it, torch.device("cpu")) for it in made] == [True, True, False]


CONVERTS: dict[str, Callable[[nn.Module], Any]] = {
    "adds, removes, reshapes or casts extra": lambda model: model.register_parameter(
        "extra", nn.Parameter(torch.ones(2))
    ),
    "adds, removes, reshapes or casts bias, weight": lambda model: model.to(torch.bfloat16),
    "unfreezes bias": lambda model: setattr(model, "bias", nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize(("said", "change"), CONVERTS.items())
def test_a_converter_keeps_what_the_model_has(
    said: str, change: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine:
        def convert(self, model: nn.Module) -> None:
            change(model)

    config = Config().model_copy(update={"model": Model.model_construct(converters=["mine"])})
    monkeypatch.setitem(registry("model.converters"), "mine", lambda config: Mine())
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match=rf"test_registered.py:\d+: {said}"):
        Converters(config).convert(model)
    monkeypatch.setattr(Mine, "convert", lambda self, model: model.requires_grad_(False))
    Converters(config).convert(model)


def test_a_build_without_a_converter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config().model_copy(update={"model": Model.model_construct(converters=["mine"])})
    monkeypatch.setitem(registry("model.converters"), "mine", lambda config: None)
    with pytest.raises(ConfigError, match=r"None has no method convert"):
        Converters(config)


def ends() -> Any:
    yield "one"
    raise SystemExit(0)


WRONG_DATASETS: dict[str, Callable[[], Any]] = {
    r"fails at document 2: .*test_registered.py:\d+: SystemExit: 0": ends,
    "fails at document 2: TypeError: it is None": lambda: ["one", None, "three"],
    "fails at document 1: TypeError: the function returns a str": lambda: "a text",
    "fails at document 1: TypeError: 'int' object is not iterable": lambda: 5,
    "has no documents\n  fix:  correct the module": lambda: [],
}


@pytest.mark.parametrize(("said", "rows"), WRONG_DATASETS.items())
def test_a_dataset_that_gives_no_documents(
    said: str, rows: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry("training.dataset"), "mine", (rows, "1", __file__))
    with pytest.raises(DataError, match=f"the dataset mine {said}"):
        list(open_corpus("mine", None).chunks())


class Buffer(Decoder):
    """A decoder that keeps a number as a buffer."""

    def __init__(self, args: ModelArgs, **options: Any):
        super().__init__(args, **options)
        self.layers["1"].register_buffer("scale", torch.tensor(3.0), persistent=False)


class Parameter(Decoder):
    """A decoder that has one norm more, and a smaller one."""

    def __init__(self, args: ModelArgs, **options: Any):
        super().__init__(args, **options)
        self.first_norm = nn.RMSNorm(args.dim)
        self.norm = RMSNorm(args.dim // 2, eps=args.norm_eps)


WRONG_DECODERS = {
    "test_registered.Buffer, and the rows of the family differ in layers.1.scale\n": Buffer,
    "Parameter, and the rows of the family differ in first_norm.weight, norm.weight\n": Parameter,
}


@pytest.mark.parametrize(("said", "kind"), WRONG_DECODERS.items())
def test_a_decoder_that_is_made_of_something_else(
    said: str, kind: type[Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(spec("llama")), "decoder", lambda self: kind)
    args, cpu = resolve("llama3", "debugmodel"), torch.device("cpu")
    mesh: Any = SimpleNamespace(pp=None, cp=None)
    with pytest.raises(ConfigError, match=f"family llama, .*{said}"):
        build_model(Config(), args, mesh, cpu, param_dtype=torch.float32, seed=0, storage=False)
    with pytest.raises(ConfigError, match=said):
        load_model(write_model(tmp_path), device=cpu, dtype=torch.float32)
