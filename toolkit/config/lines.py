"""The line of each key in a TOML file, which tomllib does not tell.

tomllib reads the file again, statement by statement: a statement is the fewest lines that parse alone, for
a value that goes on in the next line is no TOML by itself. In a file that tomllib refuses, this finds what
comes before the fault, which is enough to name a key given twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.compat import tomllib

Path = tuple[str, ...]


def key_lines(text: str) -> list[tuple[Path, int]]:
    """Return (key path, 1-based line) of each table header and each value, in order of appearance.

    A value in an inline table has the line at which the whole statement begins.
    """
    found: list[tuple[Path, int]] = []
    prefix: Path = ()
    for line, statement, content in _statements(text):
        if statement.lstrip().startswith("["):
            (prefix,) = _leaves(content, ())
            found.append((prefix, line))
        else:
            found += [(path, line) for path in _leaves(content, prefix)]
    return found


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(first line, text, content) of each statement up to the first fault; comments and blanks are none."""
    lines = text.replace("\r\n", "\n").split("\n")  # TOML knows no other ends of a line
    start = 0
    for end in range(1, len(lines) + 1):
        statement = "\n".join(lines[start:end])
        try:
            content = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if content:
            yield start + 1, statement, content
        start = end


def _leaves(content: dict[str, Any], prefix: Path) -> Iterator[Path]:
    for name, value in content.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path
