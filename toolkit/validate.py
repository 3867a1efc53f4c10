"""The loss of training, without gradients, over a held-out corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch
import torch.distributed as dist

from toolkit.parallel.model_parts import MicroBatch, ModelParts
from toolkit.train_step import count_valid


@torch.no_grad()
def validate(
    model_parts: ModelParts,
    batches: Iterable[MicroBatch],
    *,
    device: torch.device,
    limit: int | None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean loss a token (nats) over all ranks' micro-batches, at most ``limit`` of them on each rank; None
    where ``stop`` was true on some rank before the end.

    Every rank must bring equally many micro-batches: sharded parameters are gathered in each.
    """
    for model in model_parts.models:
        model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    stops = torch.zeros((), device=device)
    for batch in islice(batches, limit):
        stops.fill_(stop())
        dist.all_reduce(stops)
        if stops:
            break
        batch = model_parts.prepare(batch, device)
        sums[0] += model_parts.loss(batch)
        sums[1] += count_valid([batch]) * model_parts.is_loss_rank
    dist.all_reduce(sums)
    model_parts.end_evaluation()
    for model in model_parts.models:
        model.train()
    return None if stops else (sums[0] / sums[1].clamp(min=1)).item()
