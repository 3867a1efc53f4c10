"""Rows of constant length from texts with a class, which are never split over rows.

The label of a text stands at its last token and is the number of its class; all other tokens have none. A
text longer than a row is cut there. Packed, texts share rows by best fit, each a document of its own; else
each has a row, filled up.
"""

from __future__ import annotations

import numpy as np

from toolkit.data.conversation_rows import best_fit
from toolkit.data.packing import Rows, Sample
from toolkit.data.token_files import TokenCache


class LabelledRows(Rows):
    """Rows of whole texts."""

    def __init__(
        self, corpus: TokenCache, seq_len: int, *, packing: bool, document_mask: bool = True, pad_id: int = 0
    ):
        super().__init__(corpus.tokens, corpus.offsets, seq_len, document_mask=document_mask, pad_id=pad_id)
        assert corpus.labels is not None
        self.labels = corpus.labels
        lengths = np.minimum(np.diff(corpus.offsets), seq_len)
        rows = best_fit(lengths, seq_len) if packing else np.arange(len(lengths))
        self.texts = np.argsort(rows, kind="stable")
        """The texts, row by row."""
        self.starts = np.searchsorted(rows[self.texts], np.arange(rows.max(initial=-1) + 2))
        """(rows + 1,) where each row begins in these."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, k: int) -> Sample:
        """Row ``k``."""
        row, place = self.blank(), 0
        for number, index in enumerate(self.texts[self.starts[k] : self.starts[k + 1]]):
            begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
            n = min(end - begin, self.seq_len)
            here = slice(place, place + n)
            row["tokens"][here] = self.tokens[begin : begin + n]
            if self.document_mask:
                row["positions"][here] = self._arange[:n]
                row["documents"][here] = number
            place += n
            row["labels"][place - 1] = self.labels[index]
        return row

    def describe(self) -> str:
        """Tell how many texts of each class there are, and how they fill the rows."""
        lengths, counts = np.diff(self.offsets), np.bincount(self.labels)
        cut = int((lengths > self.seq_len).sum())
        filled = int(np.minimum(lengths, self.seq_len).sum())
        return (
            f"{len(lengths):,} texts, by class {', '.join(f'{count:,}' for count in counts)}; "
            f"{f'{cut:,} cut' if cut else 'none cut'}\n  {len(self):,} rows of {self.seq_len:,}: "
            f"{1 - filled / (len(self) * self.seq_len):.2%} padding"
        )
