"""Rows of constant length from labeled texts, which are never split across rows.

The label at a text's last token is its class number; all other tokens have no label. A text longer than a row
is truncated. With packing, texts share rows by best fit, each as its own document; otherwise each has a
padded row.
"""

from __future__ import annotations

import numpy as np

from toolkit.data.conversation_rows import best_fit
from toolkit.data.packing import Rows, Sample
from toolkit.data.token_files import TokenCache


class LabeledRows(Rows):
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
        """Indices of the texts, row by row."""
        self.starts = np.searchsorted(rows[self.texts], np.arange(rows.max(initial=-1) + 2))
        """(rows + 1,) start of each row in ``texts``."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sample(self, k: int) -> Sample:
        """Return row ``k``."""
        row, position = self.blank(), 0
        for number, index in enumerate(self.texts[self.starts[k] : self.starts[k + 1]]):
            begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
            n = min(end - begin, self.seq_len)
            positions = slice(position, position + n)
            row["tokens"][positions] = self.tokens[begin : begin + n]
            if self.document_mask:
                row["positions"][positions] = self._arange[:n]
                row["documents"][positions] = number
            position += n
            row["labels"][position - 1] = self.labels[index]
        return row

    def describe(self) -> str:
        """Describe the number of texts per class and how they fill the rows."""
        lengths, counts = np.diff(self.offsets), np.bincount(self.labels)
        cut = int((lengths > self.seq_len).sum())
        filled = int(np.minimum(lengths, self.seq_len).sum())
        return (
            f"{len(lengths):,} texts, by class {', '.join(f'{count:,}' for count in counts)}; "
            f"{f'{cut:,} truncated' if cut else 'none truncated'}\n  {len(self):,} rows of {self.seq_len:,}: "
            f"{1 - filled / (len(self) * self.seq_len):.2%} padding"
        )
