"""The line of each key of a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.config.toml_text import LEXEMES, MAX_DEPTH, parse_toml

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
    text = text.replace("\r\n", "\n") + "\n"  # TOML knows no other ends of a line
    start = line = depth = 0
    for found in LEXEMES.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if found[0] != "\n" or depth > 0:
            continue
        statement = text[start : found.start()]
        try:
            content = parse_toml(statement)
        except ValueError:
            return
        if content:
            yield line + 1, statement, content
        start, line, depth = found.end(), line + statement.count("\n") + 1, 0


def _leaves(content: dict[str, Any], prefix: Path) -> Iterator[Path]:
    for name, value in content.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value and len(path) < MAX_DEPTH:
            yield from _leaves(value, path)
        else:
            yield path
