"""Learning rate as a pure function of the step: nothing to save, nothing to restore. Imports no torch.

The values are those of torchtitan 0.2: linear warm-up, a stable phase, then decay::

    lr ┤    ╭──────────╮
       │  ╱            ╰╲
       │╱                 ╲___ lr · min_lr_factor
       └────┴──────────┴──────▶ step
       warmup   stable   decay
"""

from __future__ import annotations

import math

DECAYS = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(
    step: int,
    *,
    lr: float,
    total_steps: int,
    warmup_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
    warmup_ratio: float | None = None,
    step_size: float = 1.0,
    gamma: float = 0.85,
) -> float:
    """The learning rate of the update that follows ``step`` finished ones (``step`` is 0 for the first).

    ``decay_ratio`` is the decaying share of ``total_steps``; None decays right after the warm-up. A
    warm-up longer than the run, or a decay longer than what the warm-up leaves, is cut to fit. The
    schedule has one step more than the run, so that the last update still moves the weights; past
    ``total_steps`` the rate stays at ``lr * min_lr_factor``.

    Raises:
        KeyError: ``decay_type`` is none of ``DECAYS``.
    """
    warmup = min(warmup_steps, total_steps)
    decay = total_steps - warmup
    if decay_ratio is not None:
        decay = min(round(total_steps * decay_ratio), decay)
    decay_start = total_steps + 1 - decay
    if step < warmup:
        factor = (step + 1) / warmup
    elif step < decay_start:
        factor = 1.0
    else:
        progress = min(1.0, (step + 1 - decay_start) / decay) if decay else 1.0
        factor = min_lr_factor + (1.0 - min_lr_factor) * DECAYS[decay_type](progress)
    return lr * factor
