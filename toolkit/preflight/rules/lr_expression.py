"""The check of a learning-rate schedule that is a user's."""

from __future__ import annotations

import math

from toolkit.errors import Problem
from toolkit.optim.lr_expression import EXPRESSION, factor
from toolkit.optim.lr_scheduler import warmup_length
from toolkit.preflight.planned_run import PlannedRun

_KEY = "lr_scheduler.expression"
_LOOKED_AT = 1000  # steps, spread evenly over the run


def wrong_rates(run: PlannedRun) -> list[Problem]:
    """Say which step has no rate, or none of at least 0."""
    options, training = run.config.lr_scheduler, run.config.training
    ours = options.decay_type == EXPRESSION
    key = _KEY if ours else "lr_scheduler.decay_type"
    fix = 'write a part of optimizer.lr by step, such as "1 / sqrt(step)"' if ours else "correct the function"
    if ours and options.expression is None:
        return [run.problem("lr_scheduler.decay_type", f"{_KEY} says nothing", fix)]
    total = options.total_steps or training.steps
    warmup = warmup_length(options, total)
    last = total if training.epochs else max(total, training.steps)
    for step in sorted({1, total, last, *range(1, last, max(1, last // _LOOKED_AT))}):
        try:
            value = factor(options, step=step, total_steps=total, warmup_steps=warmup)
        except Exception as error:  # whatever a user's function does wrong
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return [run.problem(key, f"at step {step} of {last}: {said}", fix)]
        if not (math.isfinite(value) and value >= 0):
            return [run.problem(key, f"at step {step} of {last} the rate would be {value} of the peak", fix)]
    return []
