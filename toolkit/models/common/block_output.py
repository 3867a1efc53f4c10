"""Losses and statistics that blocks report beside hidden states, and how they reach the
objective.

A block is pure: it returns them, so that activation checkpointing may compute it again. Decoder adds them up
outside, once a micro-batch. A loss joins the objective in the backward alone: its gradient is attached to the
hidden states, which works the same in one model and in any stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BlockOutput(NamedTuple):
    """Hidden states (B, S, D) with scalars by name, each a sum over the tokens of these hidden states.

    Under tensor and context parallelism these are this rank's part of the sequence, so that the sums of all
    ranks add up to the batch's. The gradient of ``losses`` is added to that of the objective; they and
    ``statistics`` are logged, divided as the objective is: a mean per token, layers added up. Names are those
    of :meth:`~toolkit.models.common.spec.ModelSpec.reported`.
    """

    hidden: Tensor
    losses: Mapping[str, Tensor] = {}
    statistics: Mapping[str, Tensor] = {}


class BlockSums:
    """Sums of what the blocks of a model report in the micro-batches of a step.

    Attributes:
        scale: by which losses are multiplied in backward, a scalar; None outside of a training step.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.sums: dict[str, Tensor] = {}

    def hidden(self, output: Tensor | BlockOutput) -> Tensor:
        """Return the hidden states of a block with the gradient of its losses, and add up what it reports."""
        if isinstance(output, Tensor):
            return output
        hidden, losses, statistics = output
        if self.scale is None or not torch.is_grad_enabled():
            return hidden
        for name, value in (*losses.items(), *statistics.items()):
            self.sums[name] = self.sums.get(name, 0) + value.detach().double()
        for loss in losses.values():
            hidden = _WithLoss.apply(hidden, loss, self.scale)
        return hidden

    def take(self, name: str, like: Tensor) -> Tensor:
        """Return the sum of ``name`` as a scalar ``like`` this one, and forget it."""
        return like.new_zeros(()) + self.sums.pop(name, 0)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return hidden.clone()  # pipelines detach the output of a stage in place, which torch allows no view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale, None
