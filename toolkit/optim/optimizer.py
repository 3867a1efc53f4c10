"""Build the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.compat import init_adam_group
from toolkit.config import Config
from toolkit.distributed.dtensor import clean_name, local
from toolkit.optim.ema import WeightAverage
from toolkit.optim.groups import parameter_options

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# torch's options for each implementation.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class _LocalAdam(torch.optim.Adam):
    """torch's Adam with kernels that operate on the local shards of DTensors. Shards suffice because
    gradients are sharded like their parameters and the update is elementwise. torch's dispatch of hundreds of
    DTensors takes about a second in the first step and milliseconds in every other."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex = init_adam_group(self, group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return is_complex


class Adam(_LocalAdam):
    """Adds weight decay to the gradient, and thereby to the moments (L2 regularization)."""


class AdamW(_LocalAdam, torch.optim.AdamW):
    """Decays the weights directly, not through the gradient."""


OPTIMIZERS: dict[str, type[_LocalAdam]] = {"AdamW": AdamW, "Adam": Adam}
Build = Callable[[NamedParameters, Config], Optimizer]
"""Builds a configuration's optimizer over the trainable ones of the named parameters. Except torch's Adam,
optimizers have a method ``fresh_state(parameter, group)`` that returns the state tensors before the first
step."""
BUILDERS = {"AdamW8bit": "toolkit.optim.adamw_8bit", "Muon": "toolkit.optim.muon"}
"""Modules that define ``build``, a :data:`Build`."""


def parameter_groups(parameters: NamedParameters, config: Config) -> list[dict]:
    """Build one group of trainable parameters per learning rate, weight decay and optimizer; one empty group
    if nothing is trainable.

    Before each step, ``lr`` of a group is set to the schedule's learning rate times its ``lr_ratio``. Groups
    that AdamW updates instead of ``optimizer.name`` have ``adamw`` set.

    Raises:
        ValueError: ``optimizer.layer_lr_decay`` is set without ``model.n_layers``.
    """
    options, n_layers = config.optimizer, config.model.n_layers
    groups: dict[tuple[float, float, bool], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for wrapped_name, parameter in parameters:
        if parameter.requires_grad:
            name = clean_name(wrapped_name)
            groups[parameter_options(name, options, n_layers)[1:]].append((name, parameter))
    if not groups:  # a pipeline stage whose blocks are all frozen
        groups[1.0, options.weight_decay, False] = []
    return [
        {"params": named, "lr": options.lr * ratio, "lr_ratio": ratio, "weight_decay": decay}
        | ({"adamw": True} if adamw else {})
        for (ratio, decay, adamw), named in groups.items()
    ]


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rates of all groups for a step, given that of the schedule."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


def build_optimizer(parameters: NamedParameters, config: Config, *, n_layers: int | None = None) -> Optimizer:
    """Build the optimizer of ``config`` over the trainable ones of ``parameters`` (plain or DTensor).

    ``implementation`` selects torch's "for-loop", "foreach" or "fused" kernels, which differ only in speed
    and rounding. ``early_step_in_backward`` updates in backward
    (:class:`toolkit.optim.optimizer_in_backward.StepInBackward`). ``n_layers``, the number of blocks of the
    whole model, overrides ``model.n_layers`` for ``layer_lr_decay``.

    Raises:
        ValueError: torch rejects an option, or ``layer_lr_decay`` is set without a number of blocks.
    """
    options, parameters = config.optimizer, list(parameters)
    if n_layers is not None:
        model = config.model.model_copy(update={"n_layers": n_layers})
        config = config.model_copy(update={"model": model})
    if options.name in OPTIMIZERS:
        optimizer: Optimizer = OPTIMIZERS[options.name](
            parameter_groups(parameters, config),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            **IMPLEMENTATIONS[options.implementation],
        )
    else:
        build: Build = import_module(BUILDERS.get(options.name, "toolkit.optim.registered")).build
        optimizer = build(parameters, config)
    if options.early_step_in_backward:
        from toolkit.optim.optimizer_in_backward import StepInBackward

        optimizer = StepInBackward(optimizer)
    if options.ema_decay is not None:
        average = WeightAverage((parameter for _, parameter in parameters), options.ema_decay)
        optimizer.weight_average = average  # type: ignore[attr-defined]
    return optimizer
