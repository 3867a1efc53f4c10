"""Score continuations: their log-likelihood, and whether the model would generate them by greedy decoding.

Rows are sharded over the data-parallel ranks, and all ranks get all scores. Ranks that share a sharded model
run the same number of forwards, with empty batches at the end.

The head computes the scores instead of its losses. Like losses, scores are then sharded on any mesh, and the
weight of the head is gathered once.

Shapes: B rows, S tokens, T = B·S, D model dim, V vocabulary, R all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from toolkit.loss import IGNORED_LABEL
from toolkit.models.common.lm_head import OutputHead
from toolkit.parallel.objective import MicroBatch

_CHUNK_TOKENS = 1024  # maximum number of tokens whose logits exist at a time


class ScoredRow(NamedTuple):
    """Tokens to predict after at least one token of context."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether each of its tokens is the most likely."""

    log_likelihood: float
    greedy: bool


class RowScorer(ABC):
    """Scores rows, ``batch_size`` at a time. ``is_loss_rank`` is true on one rank of each pp and tp group.
    Rows are padded to a multiple of ``multiple`` tokens; with ``few_shapes``, to a power of two times that,
    and batches to ``batch_size`` rows."""

    multiple = 1
    few_shapes = False

    def __init__(
        self, *, batch_size: int, device: torch.device, dp_rank: int, dp_size: int, is_loss_rank: bool
    ):
        self.batch_size, self.device = batch_size, device
        self.dp_rank, self.dp_size, self.is_loss_rank = dp_rank, dp_size, is_loss_rank

    @abstractmethod
    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """Run a forward. Returns the scores of this rank's labels, (T, 2) as in :func:`scores_for_losses`,
        and ``rows`` (B, S) of the same tokens, or None on a rank without the head."""

    @torch.no_grad()
    def scores(self, rows: Sequence[ScoredRow]) -> list[Score]:
        """Score the continuation of each row."""
        sums_R2 = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.device)
        for indices in self._batch_indices(rows):
            if found := self._scores(self._batch(rows, indices)):
                scores_T2, rows_BS = found
                sums_R2.index_add_(0, rows_BS.flatten(), scores_T2 * self.is_loss_rank)
        self._sum_over_ranks(sums_R2)
        return [Score(log_likelihood, misses == 0) for log_likelihood, misses in sums_R2.tolist()]

    def _batch_indices(self, rows: Sequence[ScoredRow]) -> Iterator[list[int]]:
        """Yield the row indices of this rank's batches, longest rows first, with empty batches so that all
        ranks have the same number."""
        lengths = [len(row.context) + len(row.continuation) for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -lengths[index])
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        for first in range(0, len(batches), self.dp_size):
            index = first + self.dp_rank
            yield batches[index] if index < len(batches) else []

    def _batch(self, rows: Sequence[ScoredRow], indices: Sequence[int]) -> MicroBatch:
        """Pad rows at their end; if there are none, return one row without labels."""
        inputs = [[*rows[index].context, *rows[index].continuation[:-1]] for index in indices]
        inputs += [[0]] * ((self.batch_size if self.few_shapes else 1) - len(inputs))
        parts = -(-max(map(len, inputs)) // self.multiple)
        if self.few_shapes:
            parts = 1 << (parts - 1).bit_length()
        tokens_BS = torch.zeros(len(inputs), parts * self.multiple, dtype=torch.int64)
        labels_BS, rows_BS = torch.full_like(tokens_BS, IGNORED_LABEL), torch.zeros_like(tokens_BS)
        for row, ids in enumerate(inputs):
            tokens_BS[row, : len(ids)] = torch.tensor(ids)
        for row, index in enumerate(indices):
            continuation = rows[index].continuation
            assert rows[index].context and continuation, "rows have context and continuation"
            first = len(rows[index].context) - 1
            labels_BS[row, first : first + len(continuation)] = torch.tensor([*continuation])
            rows_BS[row] = index
        return {"tokens": tokens_BS, "labels": labels_BS, "rows": rows_BS}

    def _sum_over_ranks(self, x: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(x)


@contextmanager
def scores_for_losses(head: OutputHead | None) -> Iterator[None]:
    """Make the head return scores (T, 2) in fp64 instead of losses: the log-probability of each label, and 1
    if another token is more likely, else 0; both are 0 where there is no label. A pipeline stage before the
    last has no head."""
    if head is None:
        yield
        return

    def scores(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        is_label_T = labels_T != IGNORED_LABEL
        kept_T = is_label_T.clone()
        kept_T[0] |= ~kept_T.any()  # tensor-parallel ranks gather at least one row
        chunks = zip(h_TD[kept_T].split(_CHUNK_TOKENS), labels_T[kept_T].split(_CHUNK_TOKENS), strict=True)
        found = [_score_labels(head.logits(h, weight_VD), labels.clamp(min=0)) for h, labels in chunks]
        scores_T2 = torch.zeros(len(labels_T), 2, dtype=torch.float64, device=h_TD.device)
        scores_T2[kept_T] = torch.cat(found)
        return scores_T2 * is_label_T[:, None]

    before = head.loss, head.reduction, head.loss_chunk_tokens
    head.loss, head.reduction, head.loss_chunk_tokens = scores, "none", 0
    try:
        yield
    finally:
        head.loss, head.reduction, head.loss_chunk_tokens = before


def _score_labels(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    loss_N = F.cross_entropy(logits_NV, labels_N, reduction="none")
    return torch.stack((-loss_N.double(), (logits_NV.argmax(-1) != labels_N).double()), dim=1)
