"""Optimizers that a module of job.custom_import has registered, and what they owe to checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from toolkit.config import Config
from toolkit.config.custom_import import misused
from toolkit.config.schema import added
from toolkit.distributed.dtensor import clean_name
from toolkit.errors import ConfigError, first_few
from toolkit.optim.optimizer import NamedParameters

_KEY = "optimizer.name"


def build(parameters: NamedParameters, config: Config) -> Optimizer:
    """The optimizer of ``config``.

    Raises:
        ConfigError: it is none, leaves parameters out, or cannot say what it keeps of one; at the first step,
            it keeps something else.
    """
    named, name = list(parameters), config.optimizer.name
    made = added(_KEY)[name]
    optimizer = made(iter(named), config)

    def wrong(rule: str) -> ConfigError:
        return misused(config, _KEY, name, made, rule)

    if not isinstance(optimizer, Optimizer):
        raise wrong(f"returns {optimizer!r}, not a torch.optim.Optimizer")
    there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [
        clean_name(it) for it, parameter in named if parameter.requires_grad and id(parameter) not in there
    ]
    if left:
        raise wrong(f"leaves out {first_few(left, 3)}, which require gradients")
    if not config.checkpoint.enable:
        return optimizer
    ours = isinstance(optimizer, Adam) and not optimizer.defaults.get("amsgrad")
    if not ours and not hasattr(optimizer, "fresh_state"):
        raise wrong(
            "its optimizer has no method fresh_state(parameter, group), which gives the tensors, by name, "
            "that it keeps of a parameter: no checkpoint could be loaded into it"
        )
    if not ours:
        _check_state(optimizer, wrong)
    return optimizer


def _check_state(optimizer: Any, wrong: Callable[[str], ConfigError]) -> None:
    """Compare what the optimizer keeps after its first step with its fresh state, of one parameter."""

    take = optimizer.step

    def step(*arguments: Any) -> None:
        del optimizer.step  # the class has the next ones
        take(*arguments)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    return check(parameter, group)

    def check(parameter: nn.Parameter, group: dict[str, Any]) -> None:
        kept, fresh = optimizer.state[parameter], optimizer.fresh_state(parameter, group)
        for state in (fresh, kept):
            if not isinstance(state, dict) or not all(isinstance(it, Tensor) for it in state.values()):
                raise wrong(f"its state of a parameter has to be tensors by name, and is {_described(state)}")
        if kept.keys() != fresh.keys():
            raise wrong(f"fresh_state gives {sorted(fresh)}, but after a step there are {sorted(kept)}")
        for key in kept:
            if kept[key].shape != fresh[key].shape:
                shapes = f"{tuple(fresh[key].shape)}, but after a step it has {tuple(kept[key].shape)}"
                raise wrong(f"fresh_state gives {key} the shape {shapes}")

    optimizer.step = step  # no hook, which a step within a step would call too


def _described(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    return ", ".join(f"{key} of {type(it).__name__}" for key, it in state.items())
