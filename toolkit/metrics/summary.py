"""Summarize a finished run: its results and their locations. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

AVERAGED = 10


def last_values(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the last ten logged values of ``key``, or the last quarter of a short run."""
    values = [record[key] for record in history if record.get(key) is not None]
    return values[-min(AVERAGED, max(1, len(values) // 4)) :]


def summary(
    history: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    tensorboard: Path | None,
    checkpoint: Path | None,
    resumed: int = 0,
    first_loss: float | None = None,
    trained: str = "",
    of_tokens: bool = True,
) -> str:
    """Return one line per result of the logged ``history``.

    A run that ``resumed`` from a step started with ``first_loss``, which its history does not contain.
    ``trained`` describes the trained part of the model in a fine-tuning run, for which peak memory is
    reported too. The perplexity is included if the loss is a mean ``of_tokens``. Skipped batches do not
    count.
    """
    skipped = {record["step"] for record in history if record.get("event") == "SKIPPED"}
    accepted = [record for record in history if record["step"] not in skipped]
    losses = [record["loss"] for record in accepted if "loss" in record]
    validation = {it["step"]: it["validation_loss"] for it in history if "validation_loss" in it}
    lines = [f"finished {steps} steps" + (f", resumed from step {resumed}" if resumed else "")]
    if losses:
        start, end = losses[0] if first_loss is None else first_loss, last_values(accepted, "loss")
        lines.append(f"  training loss    {start:.3f} → {mean(end):.3f} (mean of the last {len(end)} logged)")
    if validation:
        lines.append(f"  validation loss  {_change(validation, of_tokens)}")
    base_corpus = {it["step"]: it["base_corpus_loss"] for it in history if "base_corpus_loss" in it}
    if base_corpus:
        lines.append(f"  base corpus      {_change(base_corpus, True)}")
    scores = [record for record in history if "validation_accuracy" in record]
    if scores:
        accuracy, f1 = scores[-1]["validation_accuracy"], scores[-1]["validation_f1"]
        lines.append(f"  accuracy         {accuracy:.2%}, macro F1 {f1:.4f}")
    if trained:
        peak = max(max(it.get("memory_peak_gib", 0), it.get("memory_gib", 0)) for it in history)
        lines += [f"  trained          {trained}", f"  peak memory      {peak:.2f} GiB on rank 0"]
    if losses:
        speed = mean(last_values(history, "tokens_per_second"))
        lines.append(f"  speed            {speed:,.0f} tokens/s")
    if tensorboard:
        lines.append(f"  curves           tensorboard --logdir {tensorboard}")
    if checkpoint:
        lines.append(f"  checkpoint       {checkpoint}")
    return "\n".join(lines)


def _change(losses: Mapping[int, float], of_tokens: bool) -> str:
    """Format the initial, final and lowest of ``losses``, which are by step."""
    final = [*losses.values()][-1]
    if 0 not in losses:
        return f"{final:.3f}"
    best = min((step for step in losses if step), key=lambda step: losses[step], default=0)
    text = f"{losses[0]:.3f} → {final:.3f}"
    if of_tokens:
        text += f" (perplexity {perplexity(losses[0]):.2f} → {perplexity(final):.2f})"
    return text if losses[best] == final else f"{text}, lowest {losses[best]:.3f} at step {best}"


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token; infinity above 700, close to the overflow of
    fp64."""
    return math.exp(loss) if loss < 700 else math.inf
