"""Corpora whose documents a module of job.custom_import gives, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from toolkit.config.custom_import import user_location
from toolkit.config.schema import registry
from toolkit.data.columns import template_for
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import RowShape
from toolkit.data.text_files import PIECE_BYTES, check_text
from toolkit.errors import DataError

Row = str | Mapping[str, Any]


def registered(name: str, text_column: str, shape: RowShape | None) -> RegisteredCorpus:
    """The corpus called ``name``, which is known by its version."""
    _, version, module = registry("training.dataset")[name]
    identity = f"registered {name} {version} {text_column}"
    return RegisteredCorpus(name, (Path(module),), text_column, identity, shape)


@dataclass(frozen=True)
class RegisteredPiece:
    """A :class:`~toolkit.data.text_files.Piece` of whole documents, numbered from ``first``."""

    unit: ClassVar[str] = "document"

    path: Path
    content: tuple[Row, ...]
    first: int
    opens: bool = True
    closes: bool = True
    n_file_bytes: int = 0

    def texts(self, text_column: str) -> list[str]:
        found = (self._text(row, number, text_column) for number, row in enumerate(self.content, self.first))
        return [text for text in found if text]

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, row in enumerate(self.content, self.first):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{self.path}, document {number} is of type {type(row).__name__}, not a row by columns"
                )
            yield number, row

    def _text(self, row: Row, number: int, text_column: str) -> str:
        where = f"{self.path}, document {number}"
        if isinstance(row, str):
            check_text(row, where)
            return row
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is of type {type(row).__name__}, not a text or a row by columns")
        template = template_for(text_column, dict(row), where)
        for column in template.columns:
            check_text(row[column], f"{where}: column {column!r}")
        return template.fill([row[column] for column in template.columns])


def _documents(given: Any) -> Iterator[Row]:
    """The documents that a user's function gives. Raises TypeError for what is none."""
    if isinstance(given, str | Mapping):
        raise TypeError(f"the function gives a {type(given).__name__}, not one document after the other")
    for row in given:
        if row is None:
            raise TypeError("it is None, not a text or a row by columns")
        yield row


@dataclass(frozen=True)
class RegisteredCorpus(Corpus):
    """A corpus that :func:`toolkit.extensions.register_dataset` knows by its name. Its file is the
    module that gives the documents."""

    def pieces(self, size: int = 0) -> Iterator[RegisteredPiece]:
        """The documents, some at a time. Raises DataError where giving them fails, or gives none."""
        rows, _, _ = registry("training.dataset")[self.name]
        held: list[Row] = []
        first, size = 1, 0
        documents: Iterator[Row | None] | None = None
        for number in count(1):
            try:
                documents = documents or _documents(rows())
                row = next(documents, None)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever a user's module does wrong, sys.exit() too
                said = f"{user_location(error)}{type(error).__name__}: {error}"
                message = f"the dataset {self.name} fails at document {number}: {said}"
                raise DataError(f"{message}\n  fix:  correct the module") from error
            if row is not None:
                held.append(row)
                size += len(row) if isinstance(row, str) else len(str(row))
            if held and (row is None or size >= PIECE_BYTES):
                yield RegisteredPiece(self.files[0], tuple(held), first)
                held, first, size = [], number + 1, 0
            if row is None and number == 1:
                raise DataError(f"the dataset {self.name} gives no document\n  fix:  correct the module")
            if row is None:
                return
