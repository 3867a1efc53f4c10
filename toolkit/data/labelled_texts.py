"""Texts with a class: rows of a text and a label, as tokens and the numbers of the classes.

A text becomes what its tokenizer makes of it with BOS and without EOS, which is what a program that asks the
trained model gives it.
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
from toolkit.data.text_files import Piece, check_text
from toolkit.data.token_files import LABELS
from toolkit.data.tokenize import Encoded
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError, Problem, did_you_mean, first_few, quote

VERSION = 1  # raise it when texts become other ids


@dataclass(frozen=True)
class LabelledTexts:
    """Rows with a text, in a column or a template of some, and in ``label_column`` the number or the name of
    one of the classes ``names``."""

    format: ClassVar[str] = CLASSIFICATION

    text_column: str
    label_column: str
    names: tuple[str, ...]

    def columns(self, there: Collection[str], where: str) -> list[str]:
        """The columns to read. Raises SourceError for one that is not ``there``; it says ``where``."""
        texts = template_for(self.text_column, there, where).columns
        if self.label_column not in there:
            names = first_few(list(map(repr, there)), 20) or "none"
            rule = f"{where} has no column {self.label_column!r}; it has {names}"
            fix = "set finetune.classification.label_column to the one that holds the class"
            raise SourceError(Problem(rule, fix, "label_column", self.label_column))
        return list(dict.fromkeys([*texts, self.label_column]))

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError where a row is none of these."""
        self.columns(row, where)
        self.read(row, where)

    def read(self, row: Mapping[str, Any], where: str) -> tuple[str, int]:
        """The text and the class of a row.

        Raises:
            DataError: there is no text, or the label is no class.
        """
        template = template_for(self.text_column, row, where)
        for column in template.columns:
            check_text(row[column], f"{where}: column {column!r}")
        text = template.fill([row[column] for column in template.columns])
        if not text:
            raise DataError(f"{where} has no text\n  fix:  remove the row, or write the text")
        return text, self._class(row.get(self.label_column), f"{where}: column {self.label_column!r}")

    def _class(self, label: object, where: str) -> int:
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        if isinstance(label, str) and label in map(str, range(len(self.names))):
            fix = "write the number without quotes, or give the classes' names in their order"
        elif isinstance(label, str):
            fix = did_you_mean(label, self.names, f"the classes are {first_few(list(self.names), 8)}")
        else:
            fix = f"a class is a number from 0 to {len(self.names) - 1} (as 1, not 1.0), or its name"
        raise DataError(
            f"{where} holds {quote(label)}, which is none of the {len(self.names)} classes\n  fix:  {fix} "
            "(finetune.classification.num_labels, label_names)"
        )


@dataclass(frozen=True)
class LabelledTextEncoder:
    """Turns pieces into tokens and classes."""

    tokenizer: Tokenizer
    shape: LabelledTexts
    dtype: str
    files: tuple[Path, ...] = ()
    EXTRA: ClassVar[tuple[str, ...]] = (LABELS,)

    @property
    def fingerprint(self) -> list[Any]:
        """Values that ids and classes depend on besides the text and the tokenizer."""
        shape = self.shape
        return [VERSION, shape.format, shape.text_column, shape.label_column, list(shape.names)]

    def __call__(self, piece: Piece) -> Encoded:
        found = [self.shape.read(row, f"{piece.path}, {piece.unit} {place}") for place, row in piece.rows()]
        bos = [self.tokenizer.bos_id] if self.tokenizer.adds_bos else []
        ids = self.tokenizer.encode_batch([text for text, _ in found])
        tokens = [np.array(bos + each, self.dtype) for each in ids]
        kept = [label for (_, label), each in zip(found, tokens, strict=True) if len(each)]
        lengths = np.array([len(each) for each in tokens], np.int64)
        joined = np.concatenate([np.zeros(0, self.dtype), *tokens])
        return Encoded(joined, lengths, True, True, piece.n_file_bytes, {LABELS: np.array(kept, np.int32)})
