"""Labeled texts for classification: rows of a text and a label, as token ids and class numbers.

A text is encoded with BOS and without EOS, as in inference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.data.columns import template_for
from toolkit.data.corpus import CLASSIFICATION
from toolkit.data.file_kinds import SourceError
from toolkit.data.text_files import Chunk, row_text
from toolkit.data.token_files import LABELS
from toolkit.data.tokenize import Encoded
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError, Problem, did_you_mean, first_few, quote

VERSION = 1  # increment when the ids of texts change


@dataclass(frozen=True)
class LabeledTexts:
    """Shape of rows with a text, in a column or template, and a class number or name in ``label_column``;
    ``names`` are the class names."""

    format: ClassVar[str] = CLASSIFICATION

    text_column: str
    label_column: str
    names: tuple[str, ...]

    def columns(self, names: Collection[str], where: str) -> list[str]:
        """Return the columns to read. Raises SourceError, with ``where``, if one is not in ``names``."""
        texts = template_for(self.text_column, names, where).columns
        if self.label_column not in names:
            present = first_few(list(map(repr, names)), 20) or "none"
            rule = f"{where} has no column {self.label_column!r}; it has {present}"
            fix = "set finetune.classification.label_column to the column with the class"
            raise SourceError(Problem(rule, fix, "label_column", self.label_column))
        return list(dict.fromkeys([*texts, self.label_column]))

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError if a row does not have this shape."""
        self.columns(row, where)
        self.read(row, where)

    def read(self, row: Mapping[str, Any], where: str) -> tuple[str, int]:
        """Return the text and the class of a row.

        Raises:
            DataError: There is no text, or the label is not a class.
        """
        text = row_text(row, self.text_column, where)
        if not text:
            raise DataError(f"{where} has no text\n  fix:  remove the row, or add the text")
        return text, self._class(row.get(self.label_column), f"{where}: column {self.label_column!r}")

    def _class(self, label: object, where: str) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        if isinstance(label, str) and label in map(str, range(len(self.names))):
            fix = "write the number without quotes, or set the names of the classes, in order"
        elif isinstance(label, str):
            fix = did_you_mean(label, self.names, f"the classes are {first_few(list(self.names), 8)}")
        else:
            fix = f"a class is a number from 0 to {len(self.names) - 1} (as 1, not 1.0), or its name"
        raise DataError(
            f"{where} contains {quote(label)}, which is not one of the {len(self.names)} classes\n"
            f"  fix:  {fix} (finetune.classification.num_labels, label_names)"
        )


@dataclass(frozen=True)
class LabeledTextEncoder:
    """Encodes chunks as tokens and classes."""

    tokenizer: Tokenizer
    shape: LabeledTexts
    dtype: str
    files: tuple[Path, ...] = ()
    EXTRA: ClassVar[tuple[str, ...]] = (LABELS,)

    @property
    def fingerprint(self) -> list[Any]:
        """Everything that determines ids and classes, except text and tokenizer."""
        shape = self.shape
        return [VERSION, shape.format, shape.text_column, shape.label_column, list(shape.names)]

    def __call__(self, chunk: Chunk) -> Encoded:
        rows = [self.shape.read(row, f"{chunk.path}, {chunk.unit} {number}") for number, row in chunk.rows()]
        bos = [self.tokenizer.bos_id] if self.tokenizer.adds_bos else []
        ids = self.tokenizer.encode_batch([text for text, _ in rows])
        tokens = [np.array(bos + each, self.dtype) for each in ids]
        kept = [label for (_, label), each in zip(rows, tokens, strict=True) if len(each)]
        lengths = np.array([len(each) for each in tokens], np.int64)
        joined = np.concatenate([np.zeros(0, self.dtype), *tokens])
        return Encoded(joined, lengths, True, True, chunk.n_file_bytes, {LABELS: np.array(kept, np.int32)})
