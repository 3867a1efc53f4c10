"""Rules about how long a run is, and how its learning rate goes."""

from __future__ import annotations

import math

from toolkit.config.schema import PAIRS, is_set, replaced
from toolkit.errors import Problem
from toolkit.optim.lr_scheduler import invalid_rate, is_registered, shortened_phases
from toolkit.preflight.planned_run import PlannedRun, note, rule

_ENDLESS = ("constant", "step")
_TO_ZERO = ("linear", "sqrt", "cosine")


def _both_set(run: PlannedRun, key: str, other: str, what: str) -> list[Problem]:
    """``key`` takes the place of ``other`` where it was set nearer, as epochs do of a preset's steps."""
    config = run.config
    if not (is_set(config, key) and is_set(config, other)) or other in replaced(config):
        return []
    value, where = config.value(other), config.origin(other)
    return [run.problem(key, f"{other} = {value} ({where}) gives {what}, too", "leave one of the two out")]


@rule()
def one_length(run: PlannedRun) -> list[Problem]:
    """A run is as long as its steps or as its epochs."""
    return _both_set(run, "training.epochs", "training.steps", "the length of the run")


@rule()
def one_warmup(run: PlannedRun) -> list[Problem]:
    """A warm-up is given in steps or as a part of the schedule."""
    return _both_set(run, "lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "the warm-up")


@rule()
def schedule_has_values(run: PlannedRun) -> list[Problem]:
    """A registered schedule gives a rate of at least 0 at every step. Where the length is in epochs, only the
    first step is checked here: the run counts the others."""
    options, training = run.config.lr_scheduler, run.config.training
    if not is_registered(options):
        return []
    steps = range(1, 2 if training.epochs else training.steps + 1)
    problem = invalid_rate(run.config, steps, total_steps=training.steps)
    return [problem] if problem else []


@rule()
def total_steps_act(run: PlannedRun) -> list[Problem]:
    """A schedule without an end has a length for its warm-up alone."""
    options, key = run.config.lr_scheduler, "lr_scheduler.total_steps"
    if options.total_steps is None or options.decay_type not in _ENDLESS or options.warmup_ratio is not None:
        return []
    fix = "leave it out, or set warmup_ratio, or a shape that decays to an end: linear, sqrt or cosine"
    return [run.problem(key, f'does nothing with decay_type = "{options.decay_type}"', fix)]


@rule()
def learning_rate_above_zero(run: PlannedRun) -> list[Problem]:
    """Past the end of its schedule the rate stays where it ended; at zero nothing is learnt."""
    schedule, training = run.config.lr_scheduler, run.config.training
    if schedule.total_steps is None or schedule.decay_type not in _TO_ZERO or schedule.min_lr_factor > 0:
        return []
    if training.epochs:
        length = f"the run is {training.epochs} epochs long, however many steps these are"
        fix = "leave total_steps out: the schedule is then as long as the run"
    elif schedule.total_steps < training.steps:
        length, fix = f"training.steps is {training.steps}", f"set total_steps to at least {training.steps}"
    else:
        return []
    return [
        run.problem(
            "lr_scheduler.total_steps",
            f"the schedule ends at a learning rate of 0, but {length}",
            f"{fix}, or set lr_scheduler.min_lr_factor above 0",
        )
    ]


@note
def schedule_notes(run: PlannedRun) -> list[str]:
    """Tell what is replaced or cut."""
    schedule, training = run.config.lr_scheduler, run.config.training
    said = []
    if training.epochs and is_set(run.config, "training.steps"):
        where = run.config.origin("training.steps")
        said.append(f"training.epochs {training.epochs} replaces training.steps {training.steps} ({where})")
    said += [
        f"{key} {run.config.value(key)} replaces {other} ({run.config.origin(other)})"
        for key, other in PAIRS.items()
        if run.config.depth(key) < run.config.depth(other) < math.inf
    ]
    steps = schedule.total_steps or (None if training.epochs else training.steps)
    if steps:  # those of an epoch are known once the corpus is open
        said += shortened_phases(schedule, steps)
    return said
