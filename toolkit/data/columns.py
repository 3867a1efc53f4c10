"""Which text a row holds: one of its columns, or a template of them such as ``"{question}\\n{answer}"``."""

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
    names = first_few(list(map(repr, there)), _SHOWN) or "none"
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
