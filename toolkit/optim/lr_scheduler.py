"""Learning rate schedules as pure functions of the step, without state. Imports no torch.

Linear warmup, a stable phase, then decay, with the values of torchtitan 0.2::

    lr ┤    ╭──────────╮
       │  ╱            ╰╲
       │╱                 ╲___ lr · min_lr_factor
       └────┴──────────┴──────▶ step
       warmup   stable   decay

A decay ratio below 1 is WSD (warmup, stable, decay). "constant" stays at the peak. "step" multiplies by
``gamma`` every ``step_size`` steps, like torch's StepLR; steps are counted from the start of the run,
including warmup. job.custom_import can register other schedules.

Hugging Face's schedules begin warmup at 0, so the first update has no effect. Like torchtitan's, this
schedule is one step ahead until warmup ends, and equal afterwards.
"""

from __future__ import annotations

import math

from toolkit.config import Config
from toolkit.config.optimizer import LRScheduler
from toolkit.config.schema import registry
from toolkit.errors import Problem

_KEY = "lr_scheduler.decay_type"
_MAX_CHECKS = 1000  # maximum number of steps at which a registered schedule is checked
DECAYS = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def is_registered(options: LRScheduler) -> bool:
    """Return whether job.custom_import registered the schedule."""
    return options.decay_type in registry(_KEY)


def warmup_length(options: LRScheduler, total_steps: int) -> int:
    """Return the number of warmup steps, at most ``total_steps``. ``warmup_ratio`` overrides
    ``warmup_steps``; it is rounded up to whole steps, as in Hugging Face."""
    steps = options.warmup_steps
    if options.warmup_ratio is not None:
        # In floating point, 100 · 0.07 is 7.000000000000001, but 7 is meant.
        steps = math.ceil(round(total_steps * options.warmup_ratio, 6))
    return min(steps, total_steps)


def learning_rate(
    step: int, options: LRScheduler, *, lr: float, total_steps: int, steps_an_epoch: float = 1.0
) -> float:
    """Return the learning rate of the update after ``step`` finished steps (0 for the first update).

    The schedule covers the run's ``total_steps``, unless the options set another length. ``decay_ratio`` is
    the fraction of ``total_steps`` with decay; None means that decay follows warmup. A warmup longer than the
    run, or a decay longer than the remaining steps, is shortened. The schedule has one step more than the
    run, so that the last update still has an effect; beyond ``total_steps`` the rate stays at ``lr *
    min_lr_factor``.

    Epochs can have a fractional number of steps: with 12.5, the rate changes at the fourteenth step.
    """
    total_steps = options.total_steps or total_steps
    warmup = warmup_length(options, total_steps)
    ramp = (step + 1) / warmup if step < warmup else 1.0
    if options.decay_type == "constant":
        return lr * ramp
    if options.decay_type == "step":
        size = options.step_size or steps_an_epoch
        # 9 steps with 9/7 steps per epoch are 7 epochs, but 6.999999999999999 in floating point.
        return lr * ramp * options.gamma ** math.floor(step / size + 1e-9)
    if is_registered(options):
        return lr * ramp * float(registry(_KEY)[options.decay_type](step + 1, total_steps))
    decay = total_steps - warmup
    if options.decay_ratio is not None:
        decay = min(round(total_steps * options.decay_ratio), decay)
    decay_start = total_steps + 1 - decay
    if step < decay_start:
        return lr * ramp
    progress = min(1.0, (step + 1 - decay_start) / decay) if decay else 1.0
    floor = options.min_lr_factor
    return lr * (floor + (1.0 - floor) * DECAYS[options.decay_type](progress))


def shortened_phases(options: LRScheduler, total_steps: int) -> list[str]:
    """Return a note if warmup or decay is shortened to fit a run of ``total_steps``."""
    total_steps, steps = options.total_steps or total_steps, options.warmup_steps
    if options.warmup_ratio is None and steps > total_steps:
        return [f"lr_scheduler.warmup_steps {steps} is shortened to the {total_steps} steps of the run"]
    ratio = options.decay_ratio
    decay, left = round(total_steps * (ratio or 0)), total_steps - warmup_length(options, total_steps)
    if decay > left:
        return [f"lr_scheduler.decay_ratio {ratio} is {decay} steps, shortened to the {left} after warmup"]
    return []


def invalid_rate(config: Config, steps: range, *, total_steps: int) -> Problem | None:
    """Return a problem for the first of ``steps`` at which a registered schedule over ``total_steps`` raises,
    or returns a negative or nonfinite rate. At most about a thousand evenly spaced steps are checked."""
    options = config.lr_scheduler
    total = options.total_steps or total_steps
    ends = {it for it in (total, *steps[-1:]) if it in steps}
    for step in sorted({*steps[:: max(1, len(steps) // _MAX_CHECKS)], *ends}):
        where = f"at step {step} of {steps[-1]}" if len(steps) > 1 else f"at step {step}"
        try:
            value = float(registry(_KEY)[options.decay_type](step, total))
            problem = "" if 0 <= value < math.inf else f"the rate would be {value} of the peak"
        except Exception as error:  # a user's function may raise any error
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return Problem(
                f"{where}: {problem}", "correct the function", _KEY, options.decay_type, config.origin(_KEY)
            )
    return None
