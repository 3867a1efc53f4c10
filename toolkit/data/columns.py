"""The text of a row: a column, or a template of columns such as ``"{question}\\n{answer}"``."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from toolkit.data.file_kinds import SourceError
from toolkit.errors import Problem, first_few

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")

_SHOWN = 20


class Template(NamedTuple):
    """Template of a row's text: the values of ``columns`` alternate with ``literals``."""

    literals: tuple[str, ...]
    columns: tuple[str, ...]

    def fill(self, values: Sequence[str | None]) -> str:
        """Return the text of one row. Nulls count as empty; if all values are empty, the text is empty."""
        if not any(values):
            return ""
        parts = [part for pair in zip(self.literals, values, strict=False) for part in pair]
        return "".join(part or "" for part in [*parts, self.literals[-1]])


def template_for(text_column: str, names: Collection[str], where: str) -> Template:
    """Parse ``data.text_column`` as a template over the columns ``names``.

    A column name is used as is, even if it contains braces. ``{{`` and ``}}`` are literal braces.

    Raises:
        SourceError: A column is missing; the message contains ``where`` and the existing columns.
    """
    template = Template(("", ""), (text_column,)) if text_column in names else _parse(text_column)
    missing = [column for column in template.columns if column not in names]
    if not missing:
        return template
    which = "no such column" if missing == [text_column] else f"no column {missing[0]!r}"
    present = first_few(list(map(repr, names)), _SHOWN) or "none"
    fix = 'set data.text_column to the column with the text, or to a template such as "{title}\\n{body}"'
    raise SourceError(Problem(f"{where} has {which}; it has {present}", fix, "text_column", text_column))


@functools.cache
def _parse(text: str) -> Template:
    """Parse a template; a text with unbalanced braces or without fields is a column name."""
    literals, columns, position = [""], [], 0
    for match in _FIELD.finditer(text):
        literals[-1] += text[position : match.start()]
        position = match.end()
        if match[0] in ("{{", "}}"):
            literals[-1] += match[0][0]
        elif match[1]:
            columns.append(match[1])
            literals.append("")
        else:
            return Template(("", ""), (text,))
    literals[-1] += text[position:]
    return Template(tuple(literals), tuple(columns)) if columns else Template(("", ""), (text,))
