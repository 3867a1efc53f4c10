"""An exponential moving average (EMA) of the trained weights, in at least fp32, sharded like them.

The average starts as a copy of the weights before the first step. After each update it moves towards the
weights by 1
- decay, like torch.optim.swa_utils.get_ema_multi_avg_fn. Its tensors are part of the optimizer's
(:func:`toolkit.optim.optimizer_state.optimizer_tensors`), so that checkpoints, memory estimates and
fingerprints include them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.distributed.dtensor import local


class WeightAverage:
    """The EMA of ``parameters``, those that are trained."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float):
        self.decay = decay
        self.averages: dict[nn.Parameter, Tensor] = {
            it: torch.empty_like(it.detach(), dtype=torch.promote_types(it.dtype, torch.float32))
            for it in parameters
            if it.requires_grad
        }
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the weights, after they were loaded from elsewhere."""
        for parameter, average in self.averages.items():
            local(average).copy_(local(parameter))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the updated weights."""
        for parameter, average in self.averages.items():
            shard = local(average)
            shard.lerp_(local(parameter).to(shard.dtype), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the weights to the average inside the context, which needs memory for a copy of them. Units
        must not be gathered."""
        with torch.no_grad():
            weights = {it: local(it).clone() for it in self.averages}
            for parameter, average in self.averages.items():
                local(parameter).copy_(local(average))
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in weights.items():
                    local(parameter).copy_(weight)


def weight_average(optimizer: Optimizer) -> WeightAverage | None:
    """Return the average that :func:`toolkit.optim.optimizer.build_optimizer` added to an optimizer."""
    return getattr(optimizer, "weight_average", None)
