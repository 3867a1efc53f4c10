"""Parts of messages to the user: the name that was probably meant, a size that fits, a short list, and text
that others wrote without its control characters."""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable, Sequence


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that looks most like ``name``, if any does, whatever the case."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a fix: the closest of ``names``, else ``otherwise``."""
    found = closest(name, names)
    return f"did you mean {found}?" if found else otherwise


def nearest_multiple(value: int, of: int) -> int:
    return max(1, math.floor(value / of + 0.5)) * of


def either(items: Iterable[object]) -> str:
    """``items`` as a choice: "1, 2 or 3"."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} or {last}" if rest else last


def install(extra: str) -> str:
    """The command for the packages of an extra of pyproject.toml."""
    return f".venv/bin/python -m pip install -c constraints.txt -e '.[{extra}]', in the toolkit's folder"


def first_few(items: Sequence[str], limit: int) -> str:
    """``items`` with commas between, in one line; beyond ``limit`` only how many more there are."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return one_line(", ".join(items[:limit]) + rest)


# control, format (bidirectional overrides among them), surrogate, line and paragraph separator
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """``text`` in lines; what else would steer a terminal, or hide what is there, is written as its escape.

    >>> printable("a name\\x1b[2J")
    'a name\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and unicodedata.category(character) in _STEERING
        else character
        for character in text
    )


def one_line(text: str) -> str:
    """``text`` as :func:`printable` has it, with its ends of lines escaped as well."""
    return printable(text).replace("\n", "\\n")
