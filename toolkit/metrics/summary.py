"""The last words of a run: what came out of it, where it lies and what to try next. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AVERAGED = 10


def mean_of_last(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Mean of ``key`` over the last ten logged records that have it."""
    values = [record[key] for record in history if record.get(key) is not None][-AVERAGED:]
    return sum(values) / len(values) if values else None


def summary(
    history: Sequence[Mapping[str, Any]], *, steps: int, tensorboard: Path | None, checkpoint: Path | None
) -> str:
    """A line for each result of the records that were logged, in order."""
    losses = [record["loss"] for record in history if "loss" in record]
    validation = [record["validation_loss"] for record in history if "validation_loss" in record]
    lines = [f"finished {steps} steps"]
    if losses:
        after = mean_of_last(history, "loss")
        averaged = min(AVERAGED, len(losses))
        lines.append(f"  training loss    {losses[0]:.3f} → {after:.3f} (mean of the last {averaged} logged)")
    if validation:
        lines.append(f"  validation loss  {validation[-1]:.3f}")
    speed = mean_of_last(history, "tokens_per_second")
    if speed:
        lines.append(f"  speed            {speed:,.0f} tokens/s")
    if tensorboard:
        lines.append(f"  curves           tensorboard --logdir {tensorboard}")
    if checkpoint:
        lines.append(f"  checkpoint       {checkpoint}")
    return "\n".join(lines)
