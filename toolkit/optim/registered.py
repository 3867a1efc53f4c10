"""Optimizers that a module of job.custom_import has registered, and what they owe to checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from toolkit.config import Config
from toolkit.config.custom_import import component_error
from toolkit.config.schema import registry
from toolkit.distributed.dtensor import clean_name
from toolkit.errors import ConfigError, first_few
from toolkit.optim.optimizer import NamedParameters

_KEY = "optimizer.name"


def build(parameters: NamedParameters, config: Config) -> Optimizer:
    """The optimizer of ``config``.

    Raises:
        ConfigError: it is none, leaves parameters out, or cannot say what it keeps of one; at the first step,
            it keeps something else, or anything in its groups.
    """
    named, name = list(parameters), config.optimizer.name
    made = registry(_KEY)[name]
    optimizer = made(iter(named), config)

    def wrong(rule: str) -> ConfigError:
        return component_error(config, _KEY, name, made, rule)

    if not isinstance(optimizer, Optimizer):
        raise wrong(f"returns {optimizer!r}, not a torch.optim.Optimizer")
    there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [
        clean_name(it) for it, parameter in named if parameter.requires_grad and id(parameter) not in there
    ]
    if left:
        raise wrong(f"leaves out {first_few(left, 3)}, which require gradients")
    ours = isinstance(optimizer, Adam) and not optimizer.defaults.get("amsgrad")
    if config.checkpoint.enable and not ours and not hasattr(optimizer, "fresh_state"):
        raise wrong(
            "its optimizer has no method fresh_state(parameter, group), which gives the tensors, by name, "
            "that it keeps of a parameter: no checkpoint could be loaded into it"
        )
    if config.checkpoint.enable or config.optimizer.early_step_in_backward:
        _check_first_step(optimizer, wrong, state=config.checkpoint.enable and not ours)
    return optimizer


def _check_first_step(optimizer: Any, wrong: Callable[[str], ConfigError], *, state: bool) -> None:
    """Have the optimizer's first step compare its groups with those before it; with ``state``, also what it
    keeps of one parameter with the fresh state of that."""

    take = optimizer.step

    def step(*arguments: Any) -> None:
        del optimizer.step  # the class has the next ones
        before = [_options(group) for group in optimizer.param_groups]
        take(*arguments)
        for group, options in zip(optimizer.param_groups, before, strict=True):
            check_group(_options(group), options)
        for group in optimizer.param_groups if state else []:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    return check_state(parameter, group)

    def check_group(after: dict[str, Any], before: dict[str, Any]) -> None:
        kept = sorted(key for key in after if key not in before or not _same(after[key], before[key]))
        if kept:
            raise wrong(
                f"its step changes {first_few(kept, 3)} of a group of parameters, which no checkpoint holds, "
                "nor optimizer.early_step_in_backward: what a step leaves for the next is a tensor in the "
                "state of each parameter"
            )

    def check_state(parameter: nn.Parameter, group: dict[str, Any]) -> None:
        kept, fresh = optimizer.state[parameter], optimizer.fresh_state(parameter, group)
        for found in (fresh, kept):
            if not isinstance(found, dict) or not all(isinstance(it, Tensor) for it in found.values()):
                raise wrong(f"its state of a parameter has to be tensors by name, and is {_described(found)}")
        if kept.keys() != fresh.keys():
            raise wrong(f"fresh_state gives {sorted(fresh)}, but after a step there are {sorted(kept)}")
        for key in kept:
            if kept[key].shape != fresh[key].shape:
                shapes = f"{tuple(fresh[key].shape)}, but after a step it has {tuple(kept[key].shape)}"
                raise wrong(f"fresh_state gives {key} the shape {shapes}")

    optimizer.step = step  # no hook, which a step within a step would call too


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Copy what a group has beside its parameters and the rate, which is set before each step."""
    return {key: _copied(it) for key, it in group.items() if key not in ("params", "param_names", "lr")}


def _copied(it: Any) -> Any:
    return it.clone() if isinstance(it, Tensor) else copy(it) if isinstance(it, list | dict | set) else it


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or type(one) is type(other) and bool(one == other)


def _described(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    return ", ".join(f"{key} of {type(it).__name__}" for key, it in state.items())
