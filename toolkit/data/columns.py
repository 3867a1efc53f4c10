"""Which text a row holds: one of its columns, or a template of them such as ``"{question}\\n{answer}"``."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from toolkit.errors import DataError, Problem

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


class SourceError(DataError):
    """A corpus cannot be used; its problem names one of its keys in the config, such as dataset_path."""

    def __init__(self, problem: Problem):
        self.problems = [problem]
        super().__init__(str(problem))


def is_json(path: Path) -> bool:
    """Say if the file has JSON lines (else it is plain text), by its name."""
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


CLASSIFICATION, PREFERENCE = "classification", "preference"
"""The formats of rows of a text and its class, and of two answers to a prompt."""


class RowShape(Protocol):
    """Contents of a row, where that is more than one text."""

    @property
    def format(self) -> str: ...

    def columns(self, there: Collection[str], where: str) -> list[str]:
        """The columns to read, of those that are ``there``. Raises SourceError; it says ``where``."""

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError where a row is none of these."""


class Template(NamedTuple):
    """The text of a row: ``literals`` with the values of ``columns`` between them."""

    literals: tuple[str, ...]
    columns: tuple[str, ...]

    def fill(self, values: Sequence[str | None]) -> str:
        """The text of one row. A null is empty, and a row with nothing but empty values has no text."""
        if not any(values):
            return ""
        parts = [part for pair in zip(self.literals, values, strict=False) for part in pair]
        return "".join(part or "" for part in [*parts, self.literals[-1]])


def template_for(text_column: str, there: Collection[str], where: str) -> Template:
    """``data.text_column`` as a template over the columns that are ``there``.

    The name of a column is taken as such, whatever braces it has. ``{{`` and ``}}`` are braces.

    Raises:
        SourceError: a column is missing; it says ``where``, and which columns there are.
    """
    template = Template(("", ""), (text_column,)) if text_column in there else _parse(text_column)
    missing = [column for column in template.columns if column not in there]
    if not missing:
        return template
    which = "no such column" if missing == [text_column] else f"no column {missing[0]!r}"
    names = ", ".join(map(repr, there)) or "none"
    fix = 'set data.text_column to the one that holds the text, or to a template such as "{title}\\n{body}"'
    raise SourceError(Problem(f"{where} has {which}; it has {names}", fix, "text_column", text_column))


@functools.cache
def _parse(text: str) -> Template:
    """A text with a brace that has no partner, or with no field at all, names a column."""
    literals, columns, place = [""], [], 0
    for match in _FIELD.finditer(text):
        literals[-1] += text[place : match.start()]
        place = match.end()
        if match[0] in ("{{", "}}"):
            literals[-1] += match[0][0]
        elif match[1]:
            columns.append(match[1])
            literals.append("")
        else:
            return Template(("", ""), (text,))
    literals[-1] += text[place:]
    return Template(tuple(literals), tuple(columns)) if columns else Template(("", ""), (text,))
