"""The last words of a run: what came out of it, where it lies and what to try next. Imports no torch."""

from __future__ import annotations

import math
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
    history: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    tensorboard: Path | None,
    checkpoint: Path | None,
    trained: str = "",
    of_tokens: bool = True,
) -> str:
    """A line for each result of the records that were logged, in order.

    ``trained`` tells which part of the model was trained, for a fine-tuning run, whose memory is told too.
    The loss is a mean ``of_tokens``, and so has a perplexity, or not; that of a batch that was skipped is
    left out.
    """
    refused = {record["step"] for record in history if record.get("event") == "SKIPPED"}
    accepted = [record for record in history if record["step"] not in refused]
    losses = [record["loss"] for record in accepted if "loss" in record]
    validation = {it["step"]: it["validation_loss"] for it in history if "validation_loss" in it}
    lines = [f"finished {steps} steps"]
    if losses:
        end = last(accepted, "loss")
        lines.append(
            f"  training loss    {losses[0]:.3f} → {mean(end):.3f} (mean of the last {len(end)} logged)"
        )
    if validation:
        lines.append(f"  validation loss  {_change(validation, of_tokens)}")
    forgotten = {it["step"]: it["base_corpus_loss"] for it in history if "base_corpus_loss" in it}
    if forgotten:
        lines.append(f"  base corpus      {_change(forgotten, True)}")
    scores = [record for record in history if "validation_accuracy" in record]
    if scores:
        accuracy, f1 = scores[-1]["validation_accuracy"], scores[-1]["validation_f1"]
        lines.append(f"  accuracy         {accuracy:.2%}, macro F1 {f1:.4f}")
    if trained:
        peak = max(max(it.get("memory_peak_gib", 0), it.get("memory_gib", 0)) for it in history)
        lines += [f"  trained          {trained}", f"  peak memory      {peak:.2f} GiB on rank 0"]
    if losses:
        speed = mean(last(history, "tokens_per_second"))
        lines.append(f"  speed            {speed:,.0f} tokens/s")
    if tensorboard:
        lines.append(f"  curves           tensorboard --logdir {tensorboard}")
    if checkpoint:
        lines.append(f"  checkpoint       {checkpoint}")
    return "\n".join(lines)


def _change(losses: Mapping[int, float], of_tokens: bool) -> str:
    """The last of ``losses`` by step; beside it that from before the first step, and the lowest."""
    final = [*losses.values()][-1]
    if 0 not in losses:
        return f"{final:.3f}"
    best = min((step for step in losses if step), key=lambda step: losses[step], default=0)
    text = f"{losses[0]:.3f} → {final:.3f}"
    if of_tokens:
        text += f" (perplexity {perplexity(losses[0]):.2f} → {perplexity(final):.2f})"
    return text if losses[best] == final else f"{text}, lowest {losses[best]:.3f} at step {best}"


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss in nats a token; infinity above 700, where fp64 soon ends."""
    return math.exp(loss) if loss < 700 else math.inf
