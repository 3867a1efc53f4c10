"""Rules for the length of a run and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.config.schema import ALTERNATIVES, is_set, overridden_keys
from toolkit.errors import Problem
from toolkit.optim.lr_scheduler import invalid_rate, is_registered, shortened_phases
from toolkit.preflight.planned_run import PlannedRun, note, rule

_ENDLESS = ("constant", "step")
_TO_ZERO = ("linear", "sqrt", "cosine")


def _both_set(run: PlannedRun, key: str, other: str, what: str) -> list[Problem]:
    """Reject ``key`` together with ``other``, unless one was set at a smaller depth and therefore overrides
    the other."""
    config = run.config
    if not (is_set(config, key) and is_set(config, other)) or other in overridden_keys(config):
        return []
    value, where = config.value(other), config.origin(other)
    return [run.problem(key, f"{other} = {value} ({where}) also sets {what}", "remove one of the two")]


@rule()
def one_length(run: PlannedRun) -> list[Problem]:
    """Check that the length of the run is set either in steps or in epochs."""
    return _both_set(run, "training.epochs", "training.steps", "the length of the run")


@rule()
def one_warmup(run: PlannedRun) -> list[Problem]:
    """Check that the warmup is set either in steps or as a fraction."""
    return _both_set(run, "lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "the warmup")


@rule()
def schedule_has_values(run: PlannedRun) -> list[Problem]:
    """Check that a registered schedule is non-negative at every step.

    If the length is in epochs, only the first step is checked here, because the number of steps is not yet
    known.
    """
    options, training = run.config.lr_scheduler, run.config.training
    if not is_registered(options):
        return []
    steps = range(1, 2 if training.epochs else training.steps + 1)
    problem = invalid_rate(run.config, steps, total_steps=training.steps)
    return [problem] if problem else []


@rule()
def total_steps_act(run: PlannedRun) -> list[Problem]:
    """Check that total_steps has an effect: a schedule without an end needs it only for warmup_ratio."""
    options, key = run.config.lr_scheduler, "lr_scheduler.total_steps"
    if options.total_steps is None or options.decay_type not in _ENDLESS or options.warmup_ratio is not None:
        return []
    fix = "remove it, set warmup_ratio, or use a schedule that decays to an end: linear, sqrt or cosine"
    return [run.problem(key, f'has no effect with decay_type = "{options.decay_type}"', fix)]


@rule()
def learning_rate_above_zero(run: PlannedRun) -> Iterator[Problem]:
    """Check that no schedule reaches a rate of 0 before the run ends, because it would stay there."""
    schedule, training = run.config.lr_scheduler, run.config.training
    if schedule.total_steps is None or schedule.decay_type not in _TO_ZERO or schedule.min_lr_factor > 0:
        return
    if training.epochs:
        length = f"the run is {training.epochs} epochs long, in a number of steps not known yet"
        fix = "remove total_steps, so that the schedule is as long as the run"
    elif schedule.total_steps < training.steps:
        length, fix = f"training.steps is {training.steps}", f"set total_steps to at least {training.steps}"
    else:
        return
    yield run.problem(
        "lr_scheduler.total_steps",
        f"the schedule ends at a learning rate of 0, but {length}",
        f"{fix}, or set lr_scheduler.min_lr_factor above 0",
    )


@note
def schedule_notes(run: PlannedRun) -> Iterator[str]:
    """Note values that are overridden or shortened."""
    schedule, training = run.config.lr_scheduler, run.config.training
    if training.epochs and is_set(run.config, "training.steps"):
        where = run.config.origin("training.steps")
        yield f"training.epochs {training.epochs} replaces training.steps {training.steps} ({where})"
    for key, other in ALTERNATIVES.items():
        if run.config.depth(key) < run.config.depth(other) < math.inf:
            yield f"{key} {run.config.value(key)} replaces {other} ({run.config.origin(other)})"
    steps = schedule.total_steps or (None if training.epochs else training.steps)
    if steps:  # with epochs, unknown until the corpus is opened
        yield from shortened_phases(schedule, steps)
