"""Line numbers of the keys of a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.config.toml_text import LEXEMES, MAX_DEPTH, parse_toml

Path = tuple[str, ...]


def key_lines(text: str) -> list[tuple[Path, int]]:
    """Return (key path, 1-based line) of each table header and value, in order of appearance.

    Values in an inline table have the line where the statement starts.
    """
    keys: list[tuple[Path, int]] = []
    prefix: Path = ()
    for line, statement, content in _statements(text):
        if statement.lstrip().startswith("["):
            (prefix,) = _leaves(content, ())
            keys.append((prefix, line))
        else:
            keys += [(path, line) for path in _leaves(content, prefix)]
    return keys


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield (first line, text, content) of each statement before the first error, without comments."""
    text = text.replace("\r\n", "\n") + "\n"  # TOML has no other line ends
    start = line = depth = 0
    for lexeme in LEXEMES.finditer(text):
        depth += (lexeme[0] in "[{") - (lexeme[0] in "]}")
        if lexeme[0] != "\n" or depth > 0:
            continue
        statement = text[start : lexeme.start()]
        try:
            content = parse_toml(statement)
        except ValueError:
            return
        if content:
            yield line + 1, statement, content
        start, line, depth = lexeme.end(), line + statement.count("\n") + 1, 0


def _leaves(content: dict[str, Any], prefix: Path) -> Iterator[Path]:
    for name, value in content.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value and len(path) < MAX_DEPTH:
            yield from _leaves(value, path)
        else:
            yield path
