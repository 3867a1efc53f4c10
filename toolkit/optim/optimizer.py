"""Build the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.compat import init_adam_group
from toolkit.config import Config
from toolkit.config.name_patterns import matches_any
from toolkit.distributed.dtensor import clean_name, local

NamedParameters = Iterable[tuple[str, nn.Parameter]]

# torch's options for each implementation.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class _LocalAdam(torch.optim.Adam):
    """torch's Adam with kernels that get the local shards of DTensors: gradients are sharded like their
    parameters, and the update is elementwise. torch's dispatch of hundreds of DTensors takes about a second
    in the first step and milliseconds in every other step."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex = init_adam_group(self, group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return is_complex


class Adam(_LocalAdam):
    """Adds weight decay to the gradient, and so to the moments (L2)."""


class AdamW(_LocalAdam, torch.optim.AdamW):
    """Decays the weights directly."""


OPTIMIZERS: dict[str, type[_LocalAdam]] = {"AdamW": AdamW, "Adam": Adam}
Build = Callable[[NamedParameters, Config], Optimizer]
"""Builds a configuration's optimizer over the trainable ones of the named parameters. Except torch's Adam,
optimizers have a method ``fresh_state(parameter, group)`` that returns the state tensors before the first
step."""
BUILDERS = {"AdamW8bit": "toolkit.optim.adamw_8bit", "Muon": "toolkit.optim.muon"}
"""Modules that define ``build``, a :data:`Build`."""


def parameter_groups(
    parameters: NamedParameters, *, weight_decay: float, no_decay: Sequence[str] = ()
) -> list[dict]:
    """Build parameter groups of the trainable parameters: with weight decay, then without; one empty group if
    nothing is trainable.

    ``no_decay`` are shell-style patterns of parameter names; by default all parameters decay, as in
    torchtitan.
    """
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {weight_decay: [], 0.0: []}
    for wrapped_name, parameter in parameters:
        name = clean_name(wrapped_name)
        if parameter.requires_grad:
            groups[0.0 if matches_any(name, no_decay) else weight_decay].append((name, parameter))
    if not any(groups.values()):  # a pipeline stage whose blocks are all frozen
        return [{"params": [], "weight_decay": weight_decay}]
    return [{"params": named, "weight_decay": decay} for decay, named in groups.items() if named]


def build_optimizer(parameters: NamedParameters, config: Config) -> Optimizer:
    """Build the optimizer of ``config`` over the trainable ones of ``parameters`` (plain or DTensor).

    ``implementation`` selects torch's "for-loop", "foreach" or "fused" kernels, which differ only in speed
    and rounding. ``early_step_in_backward`` updates in backward
    (:class:`toolkit.optim.optimizer_in_backward.StepInBackward`).

    Raises:
        ValueError: torch rejects an option.
    """
    options = config.optimizer
    if options.name in OPTIMIZERS:
        optimizer: Optimizer = OPTIMIZERS[options.name](
            parameter_groups(parameters, weight_decay=options.weight_decay, no_decay=options.no_decay),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            **IMPLEMENTATIONS[options.implementation],
        )
    else:
        build: Build = import_module(BUILDERS.get(options.name, "toolkit.optim.registered")).build
        optimizer = build(parameters, config)
    if not options.early_step_in_backward:
        return optimizer
    from toolkit.optim.optimizer_in_backward import StepInBackward

    return StepInBackward(optimizer)
