"""Training objectives: means over the global batch, from sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from toolkit.loss import IGNORED_LABEL

MicroBatch = dict[str, Tensor | None]
"""``tokens``, ``labels`` (B, S); ``positions`` and ``documents`` (B, S) or None; ``weights`` (B, S) if tokens
are weighted; and the fields of an objective."""


def count_valid(batches: Iterable[MicroBatch]) -> Tensor:
    """Count the valid labels of the micro-batches. Returns an int64 scalar on their device."""
    counts = [(batch["labels"] != IGNORED_LABEL).sum() for batch in batches]  # type: ignore[union-attr]
    return torch.stack(counts).sum()


def divisor(count: Tensor) -> Tensor:
    """Return the divisor of a batch's sums; 1 if the count is 0, so that loss and gradient are 0, not 0/0."""
    return torch.where(count > 0, count, 1)


class Objective:
    """The next-token loss, averaged over tokens.

    Attributes:
        reduction: the head's reduction of token losses, "sum" or "none", or "scores".
        names: metrics logged in addition to the loss.
        fields: fields added to a micro-batch, with one row per sample.
        token_fields: fields of a micro-batch with one column per token.
        models: further models that it runs, such as a teacher.
        measures: number of sums that :meth:`measure` returns.
        measured: these sums, over the global batch.
    """

    reduction = "sum"
    names: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    token_fields: tuple[str, ...] = ()
    models: Sequence[nn.Module] = ()
    measures = 0
    measured: Tensor | None = None

    def measure(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> Tensor:
        """Return this rank's contribution, without gradients, to sums on which the loss of every micro-batch
        depends, (measures,) fp64."""
        raise NotImplementedError

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Add the objective's fields to a micro-batch of full sequences."""
        return batch

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        """Add the reference model's results, if there is one, to the prepared micro-batch. ``forward`` runs a
        micro-batch through ``models``."""
        return batch

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's contribution to the divisor of the mean over the micro-batches."""
        return count_valid(batches)

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss with its gradient, and this rank's contribution to the sums of loss and
        metrics, (1 + names,) fp64."""
        return output, output.detach().double()[None]


class WeightedObjective(Objective):
    """The next-token loss, averaged with the weights of the labels, which default to 1."""

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
