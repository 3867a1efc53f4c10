"""Auxiliary losses and statistics that blocks return with hidden states.

A block is pure: it returns these values, so activation checkpointing may recompute it. Decoder sums them
outside the block, once per micro-batch. A loss enters the objective only in backward: its gradient is
attached to the hidden states, which works in a whole model and in a pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BlockOutput(NamedTuple):
    """Hidden states (B, S, D), and named scalars, each summed over the tokens.

    Under tensor and context parallelism, a rank sums over its shard of the sequence. The gradient of
    ``losses`` is added to the objective's gradient. ``losses`` and ``statistics`` are summed over layers and
    logged as means per token of the batch, with or without a label, under the names of
    :meth:`~toolkit.models.common.spec.ModelSpec.metric_names`. ``per_layer`` are tensors of any shape that
    are summed over tokens, but not over layers.
    """

    hidden: Tensor
    losses: Mapping[str, Tensor] = {}
    statistics: Mapping[str, Tensor] = {}
    per_layer: Mapping[str, Tensor] = {}


class BlockSums:
    """Sums of the blocks' losses and statistics over the micro-batches of a step.

    Attributes:
        scale: scalar factor of the losses in backward; None outside a training step.
        counts: whether to accumulate without gradients too, as a pass before the step does.
        per_layer: sums of the blocks' tensors by name and layer.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.counts = False
        self.sums: dict[str, Tensor] = {}
        self.per_layer: dict[tuple[str, str], Tensor] = {}

    def hidden(self, output: Tensor | BlockOutput, layer: str) -> Tensor:
        """Accumulate a block's losses and statistics; return its hidden states with the losses attached."""
        if isinstance(output, Tensor):
            return output
        hidden, losses, statistics, per_layer = output
        training = self.scale is not None and torch.is_grad_enabled()
        if training or self.counts:
            for name, value in per_layer.items():
                self.per_layer[name, layer] = self.per_layer.get((name, layer), 0) + value.detach().double()
        if self.scale is None or not training:
            return hidden
        for name, value in (*losses.items(), *statistics.items()):
            self.sums[name] = self.sums.get(name, 0) + value.detach().double()
        for loss in losses.values():
            hidden = _WithLoss.apply(hidden, loss, self.scale)
        return hidden

    def take(self, name: str, like: Tensor) -> Tensor:
        """Remove the sum of ``name`` and return it as a scalar of the dtype and device of ``like``."""
        return like.new_zeros(()) + self.sums.pop(name, 0)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return hidden.clone()  # pipelines detach a stage's output in place, which torch forbids for views

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale, None
