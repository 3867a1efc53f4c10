"""Optimizers registered by job.custom_import, with checks that they work with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from toolkit.config import Config
from toolkit.config.custom_import import component_error
from toolkit.config.schema import registry
from toolkit.distributed.dtensor import clean_name
from toolkit.errors import ConfigError, first_few
from toolkit.optim.optimizer import NamedParameters, parameter_groups

_KEY = "optimizer.name"


def build(parameters: NamedParameters, config: Config) -> Optimizer:
    """Build the registered optimizer of ``config``.

    Raises:
        ConfigError: the function does not return an optimizer, or the optimizer omits parameters or lacks
            fresh_state; in the first step: its state differs from fresh_state, or it changes its groups.
    """
    named, name = list(parameters), config.optimizer.name
    builder = registry(_KEY)[name]
    optimizer = builder(iter(named), config)

    def wrong(rule: str) -> ConfigError:
        return component_error(config, _KEY, name, builder, rule)

    if not isinstance(optimizer, Optimizer):
        raise wrong(f"returns {optimizer!r}, not a torch.optim.Optimizer")
    included = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    omitted = [
        clean_name(it) for it, parameter in named if parameter.requires_grad and id(parameter) not in included
    ]
    if omitted:
        raise wrong(f"omits {first_few(omitted, 3)}, which require gradients")
    if config.optimizer.has_groups:
        expected = _options_by_parameter(SGD(parameter_groups(named, config)))
        if _options_by_parameter(optimizer) != expected:
            raise wrong(
                "ignores optimizer.groups, layer_lr_decay or loraplus_lr_ratio: its groups must be those of "
                "toolkit.optim.optimizer.parameter_groups(parameters, config)"
            )
    is_adam = isinstance(optimizer, Adam) and not optimizer.defaults.get("amsgrad")
    if config.checkpoint.enable and not is_adam and not hasattr(optimizer, "fresh_state"):
        raise wrong(
            "its optimizer has no method fresh_state(parameter, group) that returns the state tensors of a "
            "parameter by name, so checkpoints cannot be loaded"
        )
    if config.checkpoint.enable or config.optimizer.early_step_in_backward:
        _check_first_step(optimizer, wrong, state=config.checkpoint.enable and not is_adam)
    return optimizer


def _options_by_parameter(optimizer: Optimizer) -> dict[int, Any]:
    """Return the relative learning rate and the weight decay of each parameter."""
    return {
        id(parameter): (group.get("lr_ratio"), group.get("weight_decay"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _check_first_step(optimizer: Any, wrong: Callable[[str], ConfigError], *, state: bool) -> None:
    """Wrap the first step to check that it does not change the optimizer's groups; with ``state``, also
    compare the state of one parameter with its fresh state."""

    original_step = optimizer.step

    def step(*arguments: Any) -> None:
        del optimizer.step  # later steps use the class's method
        before = [_options(group) for group in optimizer.param_groups]
        original_step(*arguments)
        for group, options in zip(optimizer.param_groups, before, strict=True):
            check_group(_options(group), options)
        for group in optimizer.param_groups if state else []:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    return check_state(parameter, group)

    def check_group(after: dict[str, Any], before: dict[str, Any]) -> None:
        changed = sorted(key for key in after if key not in before or not _same(after[key], before[key]))
        if changed:
            raise wrong(
                f"its step changes {first_few(changed, 3)} of a parameter group, which is neither saved in "
                "checkpoints nor kept by optimizer.early_step_in_backward: store it as a tensor in the state "
                "of each parameter"
            )

    def check_state(parameter: nn.Parameter, group: dict[str, Any]) -> None:
        actual, fresh = optimizer.state[parameter], optimizer.fresh_state(parameter, group)
        for values in (fresh, actual):
            if not isinstance(values, dict) or not all(isinstance(it, Tensor) for it in values.values()):
                raise wrong(f"its state of a parameter must be tensors by name, but is {_describe(values)}")
        if actual.keys() != fresh.keys():
            raise wrong(f"fresh_state returns {sorted(fresh)}, but a step creates {sorted(actual)}")
        for key in actual:
            if actual[key].shape != fresh[key].shape:
                shapes = f"{tuple(fresh[key].shape)}, but after a step it has {tuple(actual[key].shape)}"
                raise wrong(f"fresh_state gives {key} the shape {shapes}")

    optimizer.step = step  # not a hook, because nested steps would call a hook too


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a group's options, except its parameters and the learning rate, which is set before each step."""
    return {key: _copy(it) for key, it in group.items() if key not in ("params", "param_names", "lr")}


def _copy(it: Any) -> Any:
    return it.clone() if isinstance(it, Tensor) else copy(it) if isinstance(it, list | dict | set) else it


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or type(one) is type(other) and bool(one == other)


def _describe(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    return ", ".join(f"{key} of {type(it).__name__}" for key, it in state.items())
