"""Learning rate as a pure function of the step of its schedule: no state of its own. Imports no torch.

Linear warm-up, a stable phase, then decay, with the values of torchtitan 0.2::

    lr ┤    ╭──────────╮
       │  ╱            ╰╲
       │╱                 ╲___ lr · min_lr_factor
       └────┴──────────┴──────▶ step
       warmup   stable   decay

A decay ratio below 1 is WSD (warm-up, stable, decay). Some have no end to decay towards:
"constant" stays at the peak, and "step" multiplies by ``gamma`` every ``step_size`` steps, as torch's
StepLR does, warm-up or not: its steps are counted from the start of the run, so that an epoch is an epoch.
Others are functions that job.custom_import registers.

Hugging Face's schedules count the same steps but start their warm-up at 0: there the first update moves
nothing. Ours, like torchtitan's, is one step ahead of theirs until the warm-up ends, and equal after it.
"""

from __future__ import annotations

import math

from toolkit.config import Config
from toolkit.config.schema import registry
from toolkit.config.training import LRScheduler
from toolkit.errors import Problem

_KEY = "lr_scheduler.decay_type"
_CHECKED = 1000  # steps
DECAYS = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def is_users(options: LRScheduler) -> bool:
    """Say if job.custom_import has registered the schedule."""
    return options.decay_type in registry(_KEY)


def warmup_length(options: LRScheduler, total_steps: int) -> int:
    """Steps of warm-up; a ratio takes the place of ``warmup_steps`` and is rounded up, as in Hugging Face.

    No more than ``total_steps``.
    """
    steps = options.warmup_steps
    if options.warmup_ratio is not None:
        # 100 · 0.07 is 7.000000000000001 in binary; who wrote it means 7.
        steps = math.ceil(round(total_steps * options.warmup_ratio, 6))
    return min(steps, total_steps)


def learning_rate(
    step: int, options: LRScheduler, *, lr: float, total_steps: int, steps_an_epoch: float = 1.0
) -> float:
    """The learning rate of the update that follows ``step`` finished ones (``step`` is 0 for the first).

    The schedule is over the run's ``total_steps`` where the options name no length of its own.
    ``decay_ratio`` is the decaying share of ``total_steps``; None decays right after the warm-up. A
    warm-up longer than the run, or a decay longer than what the warm-up leaves, is cut to fit. The
    schedule has one step more than the run, so that the last update still moves the weights; past
    ``total_steps`` the rate stays at ``lr * min_lr_factor``.

    An epoch need not be whole steps: one of 12.5 ends within the thirteenth, and the rate changes with the
    fourteenth.
    """
    total_steps = options.total_steps or total_steps
    warmup = warmup_length(options, total_steps)
    ramp = (step + 1) / warmup if step < warmup else 1.0
    if options.decay_type == "constant":
        return lr * ramp
    if options.decay_type == "step":
        size = options.step_size or steps_an_epoch
        # 9 steps of 9/7 steps an epoch are 7 epochs, and 6.999999999999999 in binary.
        return lr * ramp * options.gamma ** math.floor(step / size + 1e-9)
    if is_users(options):
        return lr * ramp * float(registry(_KEY)[options.decay_type](step + 1, total_steps))
    decay = total_steps - warmup
    if options.decay_ratio is not None:
        decay = min(round(total_steps * options.decay_ratio), decay)
    decay_start = total_steps + 1 - decay
    if step < decay_start:
        return lr * ramp
    progress = min(1.0, (step + 1 - decay_start) / decay) if decay else 1.0
    least = options.min_lr_factor
    return lr * (least + (1.0 - least) * DECAYS[options.decay_type](progress))


def cut_to_fit(options: LRScheduler, total_steps: int) -> list[str]:
    """Say which part of the schedule is longer than the run of ``total_steps``, and what is left of it."""
    total_steps, steps = options.total_steps or total_steps, options.warmup_steps
    if options.warmup_ratio is None and steps > total_steps:
        return [f"lr_scheduler.warmup_steps {steps} is cut to the {total_steps} steps of the run"]
    ratio = options.decay_ratio
    decay, left = round(total_steps * (ratio or 0)), total_steps - warmup_length(options, total_steps)
    if decay > left:
        return [f"lr_scheduler.decay_ratio {ratio} is {decay} steps, cut to the {left} after the warm-up"]
    return []


def wrong_rate(config: Config, steps: range, *, total_steps: int) -> Problem | None:
    """Report the first of ``steps`` at which a registered schedule over ``total_steps`` gives no rate of at
    least 0. Of more than a thousand steps as many are checked, spread evenly."""
    options = config.lr_scheduler
    total = options.total_steps or total_steps
    ends = {it for it in (total, *steps[-1:]) if it in steps}
    for step in sorted({*steps[:: max(1, len(steps) // _CHECKED)], *ends}):
        where = f"at step {step} of {steps[-1]}" if len(steps) > 1 else f"at step {step}"
        try:
            value = float(registry(_KEY)[options.decay_type](step, total))
            said = "" if 0 <= value < math.inf else f"the rate would be {value} of the peak"
        except Exception as error:  # whatever a user's function raises
            said = f"{type(error).__name__}: {error}"
        if said:
            return Problem(
                f"{where}: {said}", "correct the function", _KEY, options.decay_type, config.origin(_KEY)
            )
    return None
