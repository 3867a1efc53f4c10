"""The loss of training, without gradients, over a held-out corpus."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from toolkit.models.llama.model import Llama
from toolkit.step import MicroBatch, count_valid, loss_sum, to_device


@torch.no_grad()
def validate(
    model: Llama, batches: Iterable[MicroBatch], *, device: torch.device, limit: int | None
) -> float:
    """Mean loss a token (nats) over all ranks' micro-batches, at most ``limit`` of them on each rank.

    Every rank must bring equally many micro-batches: sharded parameters are gathered in each.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in islice(batches, limit):
        batch = to_device(batch, device)
        sums[0] += loss_sum(model, batch)
        sums[1] += count_valid([batch])
    dist.all_reduce(sums)
    # Units that wait for their backward would stay gathered: full copies in the computing precision, which
    # a checkpoint would then save in place of the shards.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.train()
    return (sums[0] / sums[1].clamp(min=1)).item()
