"""Compute the loss and perplexity of a model on text, and the log-likelihood of continuations.

A text begins with BOS, or with EOS if the tokenizer adds no BOS, and each of its tokens is predicted once. A
text longer than the context is split into windows that predict ``stride`` tokens each, with as much context
as fits. The default stride, the window length, is cheapest; then only the last window overlaps the previous
one. A smaller stride costs ``context / stride`` times as much and gives each token more context.

Rows are sharded over the ranks, and all ranks get all results. Ranks that share a sharded model run the same
number of forwards, with empty batches at the end.

Shapes: B rows, S tokens, D model dim, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from toolkit.data.dataloader import Batch
from toolkit.data.find_files import open_text
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL
from toolkit.metrics.summary import perplexity
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.objective import WeightedObjective, count_valid

_CHUNK_TOKENS = 1024  # maximum number of tokens whose logits exist at a time
_SORTED_BATCHES = 64  # batches per rank that are sorted by length together


class ScoredRow(NamedTuple):
    """Tokens to predict after at least one token of context."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the most likely."""

    log_likelihood: float
    greedy: bool


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


class Evaluator:
    """Runs ``model`` over rows, ``batch_size`` at a time; ``mesh`` is the mesh of a sharded model."""

    def __init__(self, model: Decoder, *, batch_size: int = 8, mesh: Mesh | None = None):
        self.model = model.eval()
        self.objective = WeightedObjective()
        if model.output is not None:
            model.output.reduction = self.objective.reduction
        self.batch_size = batch_size
        self.device = next(model.parameters()).device
        self.dp_rank, self.dp_size = (mesh.dp_rank, mesh.dp_size) if mesh else (0, 1)
        self.is_loss_rank = mesh is None or mesh.is_loss_rank

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

    @torch.no_grad()
    def scores(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Score the continuation of each row."""
        sums_R2 = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.device)
        for indices in self._batch_indices(rows):
            batch = self._batch(rows, indices)
            tokens_BS, labels_BS = batch["tokens"], batch["labels"]
            assert tokens_BS is not None and labels_BS is not None
            if not indices:  # run a forward because the other ranks run one
                labels_BS[0, 0] = 0
            row_N, column_N = (labels_BS != IGNORED_LABEL).nonzero(as_tuple=True)
            labels_N = labels_BS[row_N, column_N].to(self.device)
            position_N = (row_N * tokens_BS.shape[1] + column_N).to(self.device)
            with _score_in_head(self.model, position_N, labels_N):
                scores_N2 = self.model(tokens_BS.to(self.device))
            if indices:
                rows_N = torch.tensor(indices)[row_N].to(self.device)
                sums_R2.index_add_(0, rows_N, scores_N2 * self.is_loss_rank)
        self._sum_over_ranks(sums_R2)
        return [Score(log_likelihood, misses == 0) for log_likelihood, misses in sums_R2.tolist()]

    def _batch_indices(self, rows: Sequence[ScoredRow]) -> Iterator[list[int]]:
        """Yield the row indices of this rank's batches, longest rows first; empty batches equalize the number
        on all ranks."""
        lengths = [len(row.context) + len(row.continuation) for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -lengths[index])
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        for first in range(0, len(batches), self.dp_size):
            index = first + self.dp_rank
            yield batches[index] if index < len(batches) else []

    def _batch(self, rows: Sequence[ScoredRow], indices: Sequence[int]) -> Batch:
        """Pad rows at their end; if there are none, return one row without labels."""
        inputs = [[*rows[index].context, *rows[index].continuation[:-1]] for index in indices] or [[0]]
        tokens_BS = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
        labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
        for row, ids in enumerate(inputs):
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
        for row, index in enumerate(indices):
            continuation = rows[index].continuation
            assert rows[index].context and continuation, "rows have context and continuation"
            first = len(rows[index].context) - 1
            labels_BS[row, first : first + len(continuation)] = torch.tensor([*continuation])
        return {"tokens": tokens_BS, "labels": labels_BS}

    def _sum_over_ranks(self, x: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(x)


def _score_labels(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return (N, 2) in fp64: the log-probability of each label, and 1 if another token is more likely, else
    0."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    return torch.stack((-loss_N.double(), (logits_NV.argmax(-1) != labels_N).double()), dim=1)


@contextmanager
def _score_in_head(model: Decoder, position_N: Tensor, labels_N: Tensor) -> Iterator[None]:
    """Make the head return :func:`_score_labels` (N, 2) at these positions of B·S instead of logits: in
    chunks, but in one call, so that FSDP gathers its weight once."""
    head = model.output
    assert head is not None
    logits = head.logits

    def scores(h_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        h_1ND = h_BSD.flatten(0, 1)[position_N][None]
        chunks = zip(h_1ND.split(_CHUNK_TOKENS, dim=1), labels_N.split(_CHUNK_TOKENS), strict=True)
        return torch.cat([_score_labels(logits(h, weight_VD)[0], labels) for h, labels in chunks])

    head.logits = scores
    try:
        yield
    finally:
        head.logits = logits


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
    """Return the token that precedes a text: BOS if the tokenizer adds it, else EOS, else BOS.

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
