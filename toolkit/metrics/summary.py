"""The last words of a run: what came out of it, where it lies and what to try next. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

AVERAGED = 10


def last(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The last ten logged values of ``key``, or of a short run the last quarter."""
    values = [record[key] for record in history if record.get(key) is not None]
    return values[-min(AVERAGED, max(1, len(values) // 4)) :]


def summary(
    history: Sequence[Mapping[str, Any]], *, steps: int, tensorboard: Path | None, checkpoint: Path | None
) -> str:
    """A line for each result of the records that were logged, in order."""
    losses = [record["loss"] for record in history if "loss" in record]
    validation = [record["validation_loss"] for record in history if "validation_loss" in record]
    lines = [f"finished {steps} steps"]
    if losses:
        end = last(history, "loss")
        lines.append(
            f"  training loss    {losses[0]:.3f} → {mean(end):.3f} (mean of the last {len(end)} logged)"
        )
    if validation:
        lines.append(f"  validation loss  {validation[-1]:.3f}")
    if losses:
        speed = mean(last(history, "tokens_per_second"))
        lines.append(f"  speed            {speed:,.0f} tokens/s")
    if tensorboard:
        lines.append(f"  curves           tensorboard --logdir {tensorboard}")
    if checkpoint:
        lines.append(f"  checkpoint       {checkpoint}")
    return "\n".join(lines)
