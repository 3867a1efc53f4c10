"""The optimizer of a run."""

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

# Which of torch's kernels each implementation asks for.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class _OnLocalParts(torch.optim.Adam):
    """torch's Adam, whose kernels get this rank's parts of DTensors: gradients are cut as their parameters
    are, and the update is of each number by itself. Given DTensors, torch would first work out how each of
    hundreds is cut: a second or so of the first step, and milliseconds of every other."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex = init_adam_group(self, group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return is_complex


class Adam(_OnLocalParts):
    """Adds the decay to the gradient, where the moments see it (L2)."""


class AdamW(_OnLocalParts, torch.optim.AdamW):
    """Shrinks the weight itself."""


OPTIMIZERS: dict[str, type[_OnLocalParts]] = {"AdamW": AdamW, "Adam": Adam}
Build = Callable[[NamedParameters, Config], Optimizer]
"""The optimizer of a configuration over named parameters, of which it updates the trainable ones. One that is
not torch's Adam says by ``fresh_state(parameter, group)`` which tensors it keeps before the first step."""
BUILDERS = {"AdamW8bit": "toolkit.optim.adamw_8bit", "Muon": "toolkit.optim.muon"}
"""Modules whose ``build`` is a :data:`Build`."""


def parameter_groups(
    parameters: NamedParameters, *, weight_decay: float, no_decay: Sequence[str] = ()
) -> list[dict]:
    """torch's parameter groups for what is trainable: what is decayed, then what is not; an empty one only
    where nothing is.

    ``no_decay`` are patterns of names as of a shell; without any, all is decayed, as in torchtitan.
    """
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {weight_decay: [], 0.0: []}
    for wrapped_name, parameter in parameters:
        name = clean_name(wrapped_name)
        if parameter.requires_grad:
            spared = matches_any(name, no_decay)
            groups[0.0 if spared else weight_decay].append((name, parameter))
    if not any(groups.values()):  # a pipeline stage whose blocks are all frozen
        return [{"params": [], "weight_decay": weight_decay}]
    return [{"params": named, "weight_decay": decay} for decay, named in groups.items() if named]


def build_optimizer(parameters: NamedParameters, config: Config) -> Optimizer:
    """Build the optimizer of ``config`` over the trainable ones of ``parameters`` (plain or DTensor).

    ``implementation``: "for-loop" updates one tensor at a time, "foreach" a list of them in few
    kernels, "fused" all of it in one; they differ in speed and rounding only. ``no_decay`` are patterns of
    names to leave without weight decay. With ``early_step_in_backward`` the update happens there, see
    :class:`toolkit.optim.optimizer_in_backward.StepInBackward`.

    Raises:
        ValueError: a number is out of its range (torch's own checks).
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
