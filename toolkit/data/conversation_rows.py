"""Rows of constant length from conversations, which are never split over rows.

A conversation of n tokens takes n − 1 places: its last token is predicted and predicts nothing. One that
takes more places than a row has is cut. Packed, conversations are put into rows by best fit decreasing
(Johnson, "Near-optimal bin packing algorithms", 1973): the longest first, each into the row in which it
leaves the least room. Which share a row is a function of the lengths alone; rows are numbered by the first
conversation in them, and hold theirs in the order of the files. Padded, each conversation has a row of its
own.

With a document mask each conversation is a document with positions of its own, so that it has the logits
that it would have alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.data.chat.empty_masks import LEARNT, without_loss
from toolkit.data.packing import Rows, Sample
from toolkit.data.token_files import TokenCache
from toolkit.loss import IGNORED_LABEL


class ConversationRows(Rows):
    """Rows of whole conversations, those without a token to learn left out."""

    def __init__(
        self, corpus: TokenCache, seq_len: int, *, packing: bool, document_mask: bool = True, pad_id: int = 0
    ):
        super().__init__(corpus.tokens, corpus.offsets, seq_len, document_mask=document_mask, pad_id=pad_id)
        assert corpus.mask is not None
        self.mask = corpus.mask
        kept = np.flatnonzero(~without_loss(corpus, seq_len))
        places = np.minimum(np.diff(corpus.offsets)[kept] - 1, seq_len)
        rows = best_fit(places, seq_len) if packing else np.arange(len(kept))
        order = np.argsort(rows, kind="stable")
        self.conversations = kept[order]
        """The conversations that are trained on, row by row."""
        self.starts = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
        """(rows + 1,) where each row begins in these."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, k: int) -> Sample:
        """Row ``k``."""
        row, place = self.blank(), 0
        for number, index in enumerate(self.conversations[self.starts[k] : self.starts[k + 1]]):
            begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
            n = min(end - begin - 1, self.seq_len)
            here = slice(place, place + n)
            row["tokens"][here] = self.tokens[begin : begin + n]
            labels = self.tokens[begin + 1 : begin + 1 + n].astype(np.int64)
            row["labels"][here] = np.where(self.mask[begin + 1 : begin + 1 + n], labels, IGNORED_LABEL)
            if self.document_mask:
                row["positions"][here] = self._arange[:n]
                row["documents"][here] = number
            place += n
        return row


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Which row each of ``lengths`` (int64, 1 to ``capacity``) goes into, by best fit decreasing.

    Items of one length are placed together: into each row as many as it has room for, since a row that has
    taken one leaves less room than any other of its kind.
    """
    bins = np.empty(len(lengths), np.int64)
    open_rows: dict[int, list[np.ndarray]] = {}  # by the room that is left
    rooms = 0  # bit r is set where rows with room r are open
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
            last = len(placed) - each * (used - 1)  # of these are in the last row
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
    """The same rows, numbered in the order of their first items."""
    _, first, inverse = np.unique(bins, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


@dataclass(frozen=True)
class Statistics:
    """How conversations fill rows. ``lengths`` (conversations,) are all of them in tokens, whole."""

    lengths: np.ndarray
    dropped: int
    cut: int
    tokens_cut: int
    rows: int
    places: int
    filled: int
    learnt: int

    def __str__(self) -> str:
        lengths = self.lengths
        low, middle, high, most = np.percentile(lengths, [0, 50, 95, 100])
        padding, learnt = 1 - self.filled / self.places, self.learnt / self.filled
        dropped = f", {self.dropped:,} dropped without a token to learn" if self.dropped else ""
        cut = f"{self.cut:,} cut, {self.tokens_cut:,} tokens lost" if self.cut else "none cut"
        return "\n".join(
            [
                f"{len(lengths):,} conversations{dropped}; {cut}",
                f"  tokens of one: {low:,.0f} to {most:,.0f}, mean {lengths.mean():,.1f}, "
                f"median {middle:,.0f}, 95% within {high:,.0f}",
                f"  {self.rows:,} rows of {self.places // self.rows:,}: {padding:.2%} padding; "
                f"{learnt:.1%} of the tokens are learnt",
            ]
        )


def statistics(corpus: TokenCache, rows: ConversationRows) -> Statistics:
    """Count what a start tells of a corpus of conversations."""
    assert corpus.conversations is not None and corpus.mask is not None
    lengths, kept, n = np.diff(corpus.offsets), rows.conversations, rows.seq_len
    lost = np.maximum(0, lengths[kept] - 1 - n)
    learnt = int(corpus.conversations[kept, LEARNT].sum())
    for index in kept[lost > 0]:
        learnt -= int(corpus.mask[corpus.offsets[index] + n + 1 : corpus.offsets[index + 1]].sum())
    return Statistics(
        lengths=lengths,
        dropped=len(lengths) - len(kept),
        cut=int((lost > 0).sum()),
        tokens_cut=int(lost.sum()),
        rows=len(rows),
        places=len(rows) * n,
        filled=int((lengths[kept] - 1 - lost).sum()),
        learnt=learnt,
    )
