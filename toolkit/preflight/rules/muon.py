"""Rules for Muon, which updates whole matrices."""

from __future__ import annotations

import math

from toolkit.errors import Problem
from toolkit.finetune.parameters import all_shapes, trained_names
from toolkit.optim.selection import beyond_adamw
from toolkit.preflight.planned_run import PlannedRun, note, rule

_KEY = "optimizer.name"


def _updated(run: PlannedRun) -> tuple[list[int], int] | None:
    """Return the sizes of the matrices updated by Muon, one per expert of a stack, and the number of elements
    updated by AdamW; None if the optimizer is not Muon."""
    if run.config.optimizer.name != "Muon" or run.model is None:
        return None
    shapes = all_shapes(run.model, run.config.finetune)
    trained = trained_names(shapes, run.model, run.config.finetune)
    matrices = {name for name in trained if beyond_adamw(name, shapes[name], run.config.optimizer)}
    sizes = [math.prod(shapes[name][-2:]) for name in matrices for _ in range(math.prod(shapes[name][:-2]))]
    return sizes, sum(math.prod(shapes[name]) for name in trained - matrices)


@rule()
def some_matrices_are_trained(run: PlannedRun) -> list[Problem]:
    """Check that at least one linear layer's weight is trained; an adapter's parameters use AdamW."""
    updated = _updated(run)
    if updated is None or updated[0]:
        return []
    rule = "updates weights of the blocks' linear layers, but none is trained: AdamW would update everything"
    fix = 'set it to "AdamW", or add weights to finetune.trainable'
    if any(group.name for group in run.config.optimizer.groups.values()):
        fix = 'set it to "AdamW", or remove name from some of optimizer.groups'
    return [run.problem(_KEY, rule, fix)]


@rule()
def muon_steps_after_backward(run: PlannedRun) -> list[Problem]:
    """Check that parameters are not updated one by one in backward, because Muon gathers matrices in
    buckets."""
    if run.config.optimizer.name != "Muon" or not run.config.optimizer.early_step_in_backward:
        return []
    rule = f"{_KEY} = Muon gathers matrices of many units at once and cannot update a single parameter"
    return [run.problem("optimizer.early_step_in_backward", rule, f'remove it, or set {_KEY} to "AdamW"')]


@note
def muon_notes(run: PlannedRun) -> list[str]:
    """Note which parameters Muon and AdamW update."""
    updated = _updated(run)
    if updated is None:
        return []
    sizes, rest = updated
    return [f"{_KEY}: Muon updates {sum(sizes):,} parameters in {len(sizes)} matrices, AdamW {rest:,}"]
