"""Rows of constant length from a tokenized corpus.

Packed: documents are concatenated in corpus order and split every ``seq_len`` tokens. Row k reads the
``seq_len + 1`` tokens from k·seq_len on, so every token is predicted exactly once per epoch, except the first
one and a tail shorter than a row. The same documents share a row in every epoch; only the order of rows
changes. (Shuffling documents first would need a table as long as the corpus for each epoch, and the document
mask hides a document's neighbors from the model anyway.)

Padded: one document per row, truncated to ``seq_len`` tokens or padded.

With ``document_mask``, positions restart and ``documents`` increases at each document. The last token of a
document has no label, because the next token belongs to another document. A document that starts in an
earlier row restarts its positions at the row's start, because attention cannot see the earlier part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL

PADDING = -1

Sample = dict[str, np.ndarray]


class Rows(ABC):
    """Rows of a corpus: tokens, labels, positions (int64), documents (int32) and, if the corpus has any,
    label weights (float32), each (seq_len,)."""

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        seq_len: int,
        *,
        document_mask: bool = True,
        pad_id: int = 0,
    ):
        """``tokens`` (N,) unsigned; ``offsets`` (D + 1,) int64, the start of each document, then N."""
        self.tokens, self.offsets, self.seq_len = tokens, offsets, seq_len
        self.document_mask, self.pad_id = document_mask, pad_id
        self._arange = np.arange(seq_len)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, k: int) -> Sample:
        """Return row ``k``."""

    def indices(self, k: int) -> np.ndarray:
        """Return the indices in the corpus of the documents in row ``k``, if it has whole documents."""
        raise NotImplementedError

    def blank(self) -> Sample:
        """Return a row of padding."""
        row = {"tokens": np.full(self.seq_len, self.pad_id), "labels": np.full(self.seq_len, IGNORED_LABEL)}
        if self.document_mask:
            row["positions"] = np.zeros(self.seq_len, np.int64)
            row["documents"] = np.full(self.seq_len, PADDING, np.int32)
        return row


class PackedRows(Rows):
    """Rows of concatenated documents."""

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def sample(self, k: int) -> Sample:
        """Return row ``k``; reads seq_len + 1 tokens."""
        start, length = k * self.seq_len, self.seq_len
        window = self.tokens[start : start + length + 1].astype(np.int64)
        row = {"tokens": window[:-1], "labels": window[1:]}
        if self.document_mask:
            low, high = np.searchsorted(self.offsets, (start, start + length), side="right")
            begins = self.offsets[low:high] - start  # starts of the row's later documents, in (0, length]
            row["labels"] = window[1:].copy()
            row["labels"][begins - 1] = IGNORED_LABEL
            begins = begins[begins < length]
            documents = np.zeros(length, np.int32)
            documents[begins] = 1
            row["documents"] = np.cumsum(documents, dtype=np.int32)
            row["positions"] = self._arange - np.concatenate(([0], begins))[row["documents"]]
        return row


class PaddedRows(Rows):
    """Rows of one document each, truncated to the row."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, k: int) -> Sample:
        """Return document ``k``."""
        start, end = int(self.offsets[k]), int(self.offsets[k + 1])
        row = self.blank()
        n_inputs, n_labels = (min(end - start, self.seq_len), min(end - start - 1, self.seq_len))
        row["tokens"][:n_inputs] = self.tokens[start : start + n_inputs]
        row["labels"][:n_labels] = self.tokens[start + 1 : start + 1 + n_labels]
        if self.document_mask:
            row["positions"][:n_inputs] = self._arange[:n_inputs]
            row["documents"][:n_inputs] = 0
        return row


def corpus_rows(
    tokens: np.ndarray, offsets: np.ndarray, seq_len: int, *, packing: bool, document_mask: bool, pad_id: int
) -> Rows:
    """Return the rows of a corpus. Raises DataError if it is too short for one row."""
    kind = PackedRows if packing else PaddedRows
    rows = kind(tokens, offsets, seq_len, document_mask=document_mask, pad_id=pad_id)
    if len(rows) == 0:
        raise DataError(
            f"the corpus has {len(tokens):,} tokens in {len(offsets) - 1:,} documents: one packed sample of "
            f"seq_len {seq_len:,} needs {seq_len + 1:,} tokens\n"
            f"  fix:  add text, lower seq_len, or set data.packing = false (one document per row)"
        )
    return rows
