"""The objective of a run: a mean over its global batch, of sums that each micro-batch gives a share of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from toolkit.loss import IGNORED_LABEL

MicroBatch = dict[str, Tensor | None]
"""``tokens``, ``labels`` (B, S); ``positions`` and ``documents`` (B, S), or None; ``weights`` (B, S) where
tokens have some; and an objective's own."""


def count_valid(batches: Iterable[MicroBatch]) -> Tensor:
    """How many labels of these micro-batches count: an int64 scalar on their device."""
    counts = [(batch["labels"] != IGNORED_LABEL).sum() for batch in batches]  # type: ignore[union-attr]
    return torch.stack(counts).sum()


def divisor(count: Tensor) -> Tensor:
    """Divisor of a batch's sums for their means, 1 where nothing counts: loss and gradient are 0, not 0/0."""
    return torch.where(count > 0, count, 1)


class Objective:
    """The loss of the next token, a mean over tokens.

    Attributes:
        reduction: what it takes from the head: the sum of the losses of tokens, or with "none" each of them.
        names: what is reported beside the loss.
        fields: what it adds to a micro-batch, a row for each of its own.
        token_fields: those of them that are of tokens.
    """

    reduction = "sum"
    names: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    token_fields: tuple[str, ...] = ()

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch of whole sequences with what the objective adds."""
        return batch

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        """The prepared micro-batch with what the model is compared with, where it is; ``forward`` takes one
        through ``models``."""
        return batch

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Count what the mean is over in this rank's part of these micro-batches."""
        return count_valid(batches)

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum up what the model gave: the loss with its gradient, and this rank's share of the sums that are
        reported (1 + names,), the loss first, fp64."""
        return output, output.detach().double()[None]


class WeightedObjective(Objective):
    """The loss of the next token, a mean over tokens by the weights of their labels, which are 1 where a
    micro-batch has none."""

    reduction = "none"
    fields = token_fields = ("weights",)

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        labels, weights = batch["labels"], batch.get("weights")
        assert labels is not None
        counted = (labels != IGNORED_LABEL).float()
        return batch | {"weights": counted if weights is None else weights * counted}

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        sums = [batch["weights"].sum(dtype=torch.float64) for batch in batches]  # type: ignore[union-attr]
        return torch.stack(sums).sum()

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        weights = batch["weights"]
        assert weights is not None
        return super().__call__((output * weights.flatten()).sum(), batch)
