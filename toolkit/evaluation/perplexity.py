"""The loss and perplexity of a model on text, and the log-likelihood of continuations.

A text begins with BOS (where the tokenizer adds none it comes after EOS, the end of the text before), and
each of its tokens is predicted once. One longer than the context is cut into windows: a window predicts
``stride`` tokens, and sees as many before them as fit. The default, the length of a window, costs least, and
only the last window overlaps the one before; a smaller stride costs ``context / stride`` times as much and
lets each token see more.

On several ranks each takes its share of the rows, and all get all results. Ranks that shard the model make
equally many forwards: where rows run out, of rows that do not count.

Shapes: B rows, S tokens, D model dim, V vocabulary, N tokens that are scored.
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

_SCORED_AT_ONCE = 1024  # tokens that have logits at a time
_BATCHES_READ = 64  # of each rank: their rows are sorted by length


class Row(NamedTuple):
    """Tokens to predict, and at least one that comes before them."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the likeliest."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class Loss:
    """The summed loss (nats) of ``tokens`` predicted tokens, times their weights, whose sum is ``weight``;
    ``n_bytes`` of UTF-8 where the text is known."""

    total: float
    tokens: int
    weight: float
    n_bytes: int | None = None

    @property
    def mean(self) -> float:
        """Nats a token, a mean by their weights."""
        return self.total / (self.weight or 1)

    @property
    def perplexity(self) -> float:
        return perplexity(self.mean)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits a byte of the text, which do not depend on the tokenizer."""
        return self.total / math.log(2) / self.n_bytes if self.n_bytes else None


class Evaluator:
    """Runs ``model`` over rows, ``batch_size`` at a time; ``mesh`` is that of a sharded one."""

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
    def loss(self, batches: Iterable[Batch]) -> Loss:
        """Loss of micro-batches as a loader gives them, of which each data-parallel rank brings its own and
        equally many."""
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
        return Loss(total, int(tokens), weight)

    def loss_of_rows(self, rows: Iterable[Row]) -> Loss:
        """Loss of the continuations of all rows together, which are read as they are needed."""
        return self.loss(self._batches(iter(rows)))

    def _batches(self, rows: Iterator[Row]) -> Iterator[Batch]:
        while some := list(islice(rows, _BATCHES_READ * self.batch_size * self.dp_size)):
            yield from (self._batch(some, indices) for indices in self._shares(some))

    @torch.no_grad()
    def scores(self, rows: Sequence[Row]) -> list[Score]:
        """Scores of the continuations, one a row."""
        sums_R2 = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.device)
        for indices in self._shares(rows):
            batch = self._batch(rows, indices)
            tokens_BS, labels_BS = batch["tokens"], batch["labels"]
            assert tokens_BS is not None and labels_BS is not None
            if not indices:  # for the other ranks' sake
                labels_BS[0, 0] = 0
            row_N, column_N = (labels_BS != IGNORED_LABEL).nonzero(as_tuple=True)
            labels_N = labels_BS[row_N, column_N].to(self.device)
            place_N = (row_N * tokens_BS.shape[1] + column_N).to(self.device)
            with _scoring(self.model, place_N, labels_N):
                found_N2 = self.model(tokens_BS.to(self.device))
            if indices:
                of_rows_N = torch.tensor(indices)[row_N].to(self.device)
                sums_R2.index_add_(0, of_rows_N, found_N2 * self.is_loss_rank)
        self._sum_over_ranks(sums_R2)
        return [Score(log_likelihood, misses == 0) for log_likelihood, misses in sums_R2.tolist()]

    def _shares(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """This rank's rows, a batch at a time, the longest first; empty batches make up for what it has less
        than others."""
        lengths = [len(row.context) + len(row.continuation) for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -lengths[index])
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        for first in range(0, len(batches), self.dp_size):
            mine = first + self.dp_rank
            yield batches[mine] if mine < len(batches) else []

    def _batch(self, rows: Sequence[Row], indices: Sequence[int]) -> Batch:
        """Rows filled up at their end, which no token before sees; without rows one that counts nothing."""
        inputs = [[*rows[index].context, *rows[index].continuation[:-1]] for index in indices] or [[0]]
        tokens_BS = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
        labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
        for row, ids in enumerate(inputs):
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
        for row, index in enumerate(indices):
            continuation = rows[index].continuation
            assert rows[index].context and continuation, "there is something to predict, from something"
            first = len(rows[index].context) - 1
            labels_BS[row, first : first + len(continuation)] = torch.tensor([*continuation])
        return {"tokens": tokens_BS, "labels": labels_BS}

    def _sum_over_ranks(self, x: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(x)


def _scored(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """(N, 2) fp64: the log-probability of each label, and 1 where another token is likelier."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    return torch.stack((-loss_N.double(), (logits_NV.argmax(-1) != labels_N).double()), dim=1)


@contextmanager
def _scoring(model: Decoder, place_N: Tensor, labels_N: Tensor) -> Iterator[None]:
    """The head gives no logits, but the (N, 2) of :func:`_scored` for the labels at these places of all B·S:
    in pieces, within one call of it, for which FSDP gathers it once."""
    head = model.output
    assert head is not None
    logits = head.logits

    def scores(h_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        h_1ND = h_BSD.flatten(0, 1)[place_N][None]
        pieces = zip(h_1ND.split(_SCORED_AT_ONCE, dim=1), labels_N.split(_SCORED_AT_ONCE), strict=True)
        return torch.cat([_scored(logits(h, weight_VD)[0], found) for h, found in pieces])

    head.logits = scores
    try:
        yield
    finally:
        head.logits = logits


def rolling_windows(
    ids: Sequence[int], *, before: int, length: int, stride: int | None = None
) -> Iterator[Row]:
    """``ids`` in rows of at most ``length`` tokens of input, each token predicted once; the first from the
    token ``before``. Rows after the first predict ``stride`` tokens, ``length`` for None."""
    whole = [before, *ids]
    first, last = 1, 1 + length
    while first < len(whole):
        last = min(last, len(whole))
        yield Row(whole[max(0, last - 1 - length) : first], whole[first:last])
        first, last = last, last + (stride or length)


def first_token(tokenizer: Tokenizer) -> int:
    """Choose the token before a text: BOS where texts begin with it, else EOS, else BOS that is not added.

    Raises:
        DataError: the tokenizer has neither.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    found = bos if tokenizer.adds_bos or eos is None else eos
    if found is None:
        raise DataError(f"the tokenizer {tokenizer.path} has no BOS and no EOS for a text to begin with")
    return found


def documents(path: str, text_column: str = "text") -> Iterator[str]:
    """The texts of files named as in ``training.dataset_path``: a line of .jsonl is one, a text file one,
    whatever its suffix.

    Raises:
        DataError: no such files, or one that cannot be read.
        ConfigError: a column is named, and no file has any.
    """
    begun: list[str] = []
    for chunk in open_text(path, text_column).chunks():
        texts = chunk.texts(text_column)
        for index, text in enumerate(texts):
            begun.append(text)
            if index < len(texts) - 1 or chunk.closes:
                yield "".join(begun)
                begun = []


def text_loss(
    evaluator: Evaluator,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    length: int,
    stride: int | None = None,
) -> Loss:
    """Loss of texts, each by itself, in windows of ``length`` tokens.

    Raises:
        DataError: there is no text.
    """
    before, n_bytes = first_token(tokenizer), 0

    def rows() -> Iterator[Row]:
        nonlocal n_bytes
        for text in texts:
            n_bytes += len(text.encode())
            yield from rolling_windows(tokenizer.encode(text), before=before, length=length, stride=stride)

    found = evaluator.loss_of_rows(rows())
    if not found.tokens:
        raise DataError("there is no text to evaluate")
    return replace(found, n_bytes=n_bytes)
