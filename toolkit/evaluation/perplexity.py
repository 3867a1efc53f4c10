"""Compute the loss and perplexity of a model on text.

A text begins with BOS, or with EOS if the tokenizer adds no BOS. Each token of a text is predicted once. A
text longer than the context is split into windows that predict ``stride`` tokens each, with as much context
as fits. The default stride, the window length, has the lowest cost: only the last window overlaps the
previous one. A smaller stride costs ``context / stride`` times as much and gives each token more context.

Rows are sharded over the ranks, and all ranks get all results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from toolkit.data.dataloader import Batch
from toolkit.data.find_files import open_text
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.evaluation.row_scores import RowScorer, ScoredRow, scores_for_losses
from toolkit.metrics.summary import perplexity
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.objective import MicroBatch, WeightedObjective, count_valid

_SORTED_BATCHES = 64  # batches per rank that are sorted by length together


@dataclass(frozen=True)
class TextLoss:
    """The loss of a text.

    Attributes:
        total: weighted sum over the predicted tokens, in nats.
        tokens: number of predicted tokens.
        weight: sum of their weights.
        n_bytes: UTF-8 bytes of the text, if known.
    """

    total: float
    tokens: int
    weight: float
    n_bytes: int | None = None

    @property
    def mean(self) -> float:
        """Weighted mean in nats per token."""
        return self.total / (self.weight or 1)

    @property
    def perplexity(self) -> float:
        return perplexity(self.mean)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text, independent of the tokenizer."""
        return self.total / math.log(2) / self.n_bytes if self.n_bytes else None


class Evaluator(RowScorer):
    """Runs ``model`` over rows, ``batch_size`` at a time; ``mesh`` is the mesh of a sharded model."""

    def __init__(self, model: Decoder, *, batch_size: int = 8, mesh: Mesh | None = None):
        self.model = model.eval()
        self.objective = WeightedObjective()
        if model.output is not None:
            model.output.reduction = self.objective.reduction
        super().__init__(
            batch_size=batch_size,
            device=next(model.parameters()).device,
            dp_rank=mesh.dp_rank if mesh else 0,
            dp_size=mesh.dp_size if mesh else 1,
            is_loss_rank=mesh is None or mesh.is_loss_rank,
        )

    @torch.no_grad()
    def loss(self, batches: Iterable[Batch]) -> TextLoss:
        """Return the loss of a loader's micro-batches; every data-parallel rank must have the same number of
        them."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in batches:
            moved = {name: None if x is None else x.to(self.device) for name, x in batch.items()}
            moved = self.objective.prepare(moved)
            losses = self.model(
                moved["tokens"],
                positions=moved.get("positions"),
                documents=moved.get("documents"),
                labels=moved["labels"],
            )
            total = self.objective(losses, moved)[0].double()
            counts = count_valid([moved]), self.objective.count([moved])
            sums += torch.stack((total, *counts)) * self.is_loss_rank
        self._sum_over_ranks(sums)
        total, tokens, weight = sums.tolist()
        return TextLoss(total, int(tokens), weight)

    def row_loss(self, rows: Iterable[ScoredRow]) -> TextLoss:
        """Return the loss of the continuations of all rows, which are read lazily."""
        return self.loss(self._batches(iter(rows)))

    def _batches(self, rows: Iterator[ScoredRow]) -> Iterator[Batch]:
        while chunk := list(islice(rows, _SORTED_BATCHES * self.batch_size * self.dp_size)):
            yield from (self._batch(chunk, indices) for indices in self._batch_indices(chunk))

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        tokens_BS, labels_BS, rows_BS = (batch[name].to(self.device) for name in ("tokens", "labels", "rows"))  # type: ignore[union-attr]
        with scores_for_losses(self.model.output):
            return self.model(tokens_BS, labels=labels_BS), rows_BS


def rolling_windows(
    ids: Sequence[int], *, before: int, length: int, stride: int | None = None
) -> Iterator[ScoredRow]:
    """Split ``ids`` into rows of at most ``length`` input tokens, so that each token is predicted once, the
    first from the token ``before``. Rows after the first predict ``stride`` tokens, by default ``length``."""
    tokens = [before, *ids]
    first, last = 1, 1 + length
    while first < len(tokens):
        last = min(last, len(tokens))
        yield ScoredRow(tokens[max(0, last - 1 - length) : first], tokens[first:last])
        first, last = last, last + (stride or length)


def first_token(tokenizer: Tokenizer) -> int:
    """Return the token that precedes a text, which is BOS if the tokenizer adds it, else EOS, else BOS.

    Raises:
        DataError: the tokenizer has neither.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    token = bos if tokenizer.adds_bos or eos is None else eos
    if token is None:
        raise DataError(f"the tokenizer {tokenizer.path} has no BOS and no EOS for a text to begin with")
    return token


def documents(path: str, text_column: str = "text") -> Iterator[str]:
    """Yield the texts of files, selected as in ``training.dataset_path``: one per line of a .jsonl file, one
    per text file.

    Raises:
        DataError: there are no such files, or one cannot be read.
        ConfigError: a column is given, but no file has columns.
    """
    parts: list[str] = []
    for chunk in open_text(path, text_column).chunks():
        texts = chunk.texts(text_column)
        for index, text in enumerate(texts):
            parts.append(text)
            if index < len(texts) - 1 or chunk.closes:
                yield "".join(parts)
                parts = []


def text_loss(
    evaluator: Evaluator,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    length: int,
    stride: int | None = None,
) -> TextLoss:
    """Return the loss of texts, each evaluated separately, in windows of ``length`` tokens.

    Raises:
        DataError: there is no text.
    """
    before, n_bytes = first_token(tokenizer), 0

    def rows() -> Iterator[ScoredRow]:
        nonlocal n_bytes
        for text in texts:
            n_bytes += len(text.encode())
            yield from rolling_windows(tokenizer.encode(text), before=before, length=length, stride=stride)

    loss = evaluator.row_loss(rows())
    if not loss.tokens:
        raise DataError("there is no text to evaluate")
    return replace(loss, n_bytes=n_bytes)
