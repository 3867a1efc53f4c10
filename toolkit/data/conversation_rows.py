"""Rows of constant length from conversations, which are never split across rows.

A conversation of n tokens occupies n − 1 positions, because its last token is only predicted. A conversation
that needs more positions than a row has is truncated. With packing, conversations are assigned to rows by
best fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the longest first, each into the
row where it leaves the least room. The assignment depends only on the lengths. Rows are numbered by their
first conversation, which keeps the order of the files. Without packing, each conversation has its own, padded
row. The chosen and the rejected answer of a pair share a row, in this order.

With a document mask each conversation is a document with its own positions, so its logits are the same as
without packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.data.chat.empty_masks import IN_LOSS, places, together, without_loss
from toolkit.data.packing import Rows, Sample
from toolkit.data.token_files import TokenCache
from toolkit.loss import IGNORED_LABEL


class ConversationRows(Rows):
    """Rows of whole conversations; conversations without tokens in the loss are dropped."""

    predicted = 1
    """Number of tokens at the end of a conversation that are predicted, but take no position."""

    def __init__(
        self, corpus: TokenCache, seq_len: int, *, packing: bool, document_mask: bool = True, pad_id: int = 0
    ):
        super().__init__(corpus.tokens, corpus.offsets, seq_len, document_mask=document_mask, pad_id=pad_id)
        assert corpus.mask is not None
        self.mask, self.weights = corpus.mask, corpus.weights
        n = together(corpus)
        fitting = places(corpus, seq_len, predicted=self.predicted).reshape(-1, n)
        kept = np.flatnonzero(~without_loss(corpus, seq_len).reshape(-1, n).any(axis=1))
        rooms = self._rooms(corpus, kept, fitting[kept].sum(axis=1))
        rows = best_fit(rooms, seq_len) if packing else np.arange(len(kept))
        order = np.argsort(rows, kind="stable")
        self.conversations = (kept[order][:, None] * n + np.arange(n)).ravel()
        """Indices of the conversations in use, row by row."""
        self.places = fitting[kept[order]].ravel()
        """Number of positions of each conversation in ``conversations``."""
        self.starts = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2)) * n
        """(rows + 1,) start of each row in ``conversations``."""

    def _rooms(self, corpus: TokenCache, kept: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the positions that each of the ``kept`` conversations or pairs, which has ``places``, needs
        in a row."""
        return places

    def __len__(self) -> int:
        return len(self.starts) - 1

    def indices(self, k: int) -> np.ndarray:
        return self.conversations[self.starts[k] : self.starts[k + 1]]

    def sample(self, k: int) -> Sample:
        """Return row ``k``."""
        row, place = self.blank(), 0
        if self.weights is not None:
            row["weights"] = np.ones(self.seq_len, np.float32)
        there = slice(self.starts[k], self.starts[k + 1])
        for number, (index, n) in enumerate(zip(self.conversations[there], self.places[there], strict=True)):
            begin = int(self.offsets[index])
            here = slice(place, place + n)
            row["tokens"][here] = self.tokens[begin : begin + n]
            labels = self.tokens[begin + 1 : begin + 1 + n].astype(np.int64)
            row["labels"][here] = np.where(self.mask[begin + 1 : begin + 1 + n], labels, IGNORED_LABEL)
            if self.weights is not None:
                row["weights"][here] = self.weights[begin + 1 : begin + 1 + n]
            if self.document_mask:
                row["positions"][here] = self._arange[:n]
                row["documents"][here] = number
            place += n
        return row


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign ``lengths`` (int64, 1 to ``capacity``) to rows by best fit decreasing; return their rows.

    Items of equal length are assigned together: each row takes as many as fit, because a row that has just
    taken one leaves less room than the others of its kind.
    """
    bins = np.empty(len(lengths), np.int64)
    open_rows: dict[int, list[np.ndarray]] = {}  # by remaining room
    rooms = 0  # bit r is set if there are open rows with room r
    n_rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[longest_first])) + 1
    for items in np.split(longest_first, cuts) if len(lengths) else []:
        length = int(lengths[items[0]])
        while len(items):
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                rows = np.concatenate(open_rows.pop(room))
                rooms ^= 1 << room
            else:
                room = capacity
                needed = -(-len(items) // (capacity // length))
                rows = np.arange(n_rows, n_rows + needed)
                n_rows += needed
            each = room // length
            used = min(len(rows), -(-len(items) // each))
            placed = np.repeat(rows[:used], each)[: len(items)]
            bins[items[: len(placed)]] = placed
            items = items[len(placed) :]
            last = len(placed) - each * (used - 1)  # number of them in the last row
            for left, group in (
                (room - each * length, rows[: used - 1]),
                (room - last * length, rows[used - 1 : used]),
                (room, rows[used:]),
            ):
                if left and len(group):
                    open_rows.setdefault(left, []).append(group)
                    rooms |= 1 << left
    return _by_first_item(bins)


def _by_first_item(bins: np.ndarray) -> np.ndarray:
    """Renumber the rows by their first items."""
    _, first, inverse = np.unique(bins, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


@dataclass(frozen=True)
class Statistics:
    """Statistics of packed conversations. ``lengths`` (conversations,) are in tokens, before truncation."""

    lengths: np.ndarray
    dropped: int
    cut: int
    tokens_cut: int
    rows: int
    places: int
    filled: int
    learnt: int
    desirable: int | None = None
    pairs: int = 0
    alike: int = 0
    weighted: bool = False

    def __str__(self) -> str:
        lengths = self.lengths
        low, middle, high, most = np.percentile(lengths, [0, 50, 95, 100])
        padding, learnt = 1 - self.filled / self.places, self.learnt / self.filled
        dropped = f", {self.dropped:,} dropped without a token in the loss" if self.dropped else ""
        alike = f", {self.alike:,} with identical answers, which have no effect" if self.alike else ""
        pairs = f"; {self.pairs:,} pairs{alike}" if self.pairs else ""
        if self.desirable is not None:
            pairs = f"; {self.desirable:,} desirable"
        cut = f"{self.cut:,} truncated, {self.tokens_cut:,} tokens lost" if self.cut else "none truncated"
        return "\n".join(
            [
                f"{len(lengths):,} conversations{dropped}; {cut}{pairs}",
                f"  tokens per conversation: {low:,.0f} to {most:,.0f}, mean {lengths.mean():,.1f}, "
                f"median {middle:,.0f}, 95% within {high:,.0f}",
                f"  {self.rows:,} rows of {self.places // self.rows:,}: {padding:.2%} padding; "
                f"{learnt:.1%} of the tokens are trained on{', with weights' * self.weighted}",
            ]
        )


def statistics(corpus: TokenCache, rows: ConversationRows) -> Statistics:
    """Compute the statistics printed at startup."""
    assert corpus.conversations is not None and corpus.mask is not None
    lengths, kept = np.diff(corpus.offsets), rows.conversations
    lost = lengths[kept] - rows.predicted - rows.places
    learnt = int(corpus.conversations[kept, IN_LOSS].sum()) if rows.predicted else len(kept)
    for index, n in zip(kept[lost > 0], rows.places[lost > 0], strict=True):
        learnt -= rows.predicted * int(
            corpus.mask[corpus.offsets[index] + n + 1 : corpus.offsets[index + 1]].sum()
        )
    return Statistics(
        lengths=lengths,
        dropped=len(lengths) - len(kept),
        cut=int((lost > 0).sum()),
        tokens_cut=int(lost.sum()),
        rows=len(rows),
        places=len(rows) * rows.seq_len,
        filled=int(rows.places.sum()),
        learnt=learnt,
        desirable=None if corpus.labels is None else int(corpus.labels[kept].sum()),
        pairs=len(kept) // 2 if corpus.paired else 0,
        alike=_alike(corpus, kept) if corpus.paired else 0,
        weighted=corpus.weights is not None,
    )


def _alike(corpus: TokenCache, kept: np.ndarray) -> int:
    """Count the pairs whose two answers are identical."""
    chosen = kept[::2]
    lengths = np.diff(corpus.offsets)
    begins = corpus.offsets[chosen[lengths[chosen] == lengths[chosen + 1]]]
    ends = corpus.offsets[np.searchsorted(corpus.offsets, begins, side="right")]
    return sum(
        np.array_equal(corpus.tokens[begin:end], corpus.tokens[end : 2 * end - begin])
        for begin, end in zip(begins, ends, strict=True)
    )
