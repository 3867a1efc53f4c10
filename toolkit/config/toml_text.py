"""Text of TOML, parsed in a time that its writer cannot choose."""

from __future__ import annotations

import re
from typing import Any

from toolkit.compat import tomllib

MAX_LENGTH = 1_000_000
"""Characters of a document; the longest configuration written out has some 20,000."""
MAX_DEPTH = 20
"""Parts that a key may have; the longest of ours has 5. tomllib takes the square of their number."""
LEXEMES = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[][{}\n]''',
    re.DOTALL,
)
"""Brackets and ends of lines, and what may hold some that are none: strings, which may lack their end, and
comments."""
_LONG_KEY = re.compile(rf"(?<![\w \t.-])(?:[\w \t-]*\.){{{MAX_DEPTH}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a document.

    Raises:
        ValueError: it is no TOML, too long, nests too deep, or has a key of more than :data:`MAX_DEPTH`
            parts; the message ends with the place, as those of tomllib.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has more than {MAX_LENGTH:,} characters")
    if line := _line_of_long_key(text):
        raise ValueError(f"a key of more than {MAX_DEPTH} parts (at line {line}, column 1)")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _line_of_long_key(text: str) -> int:
    if text.count(".") < MAX_DEPTH:
        return 0
    plain = LEXEMES.sub(_without_content, text)
    found = _LONG_KEY.search(plain)
    return plain.count("\n", 0, found.end()) + 1 if found else 0


def _without_content(lexeme: re.Match[str]) -> str:
    """A string as a word of as many lines, a comment as nothing."""
    text = lexeme[0]
    return "_" + "\n" * text.count("\n") if text[0] in "\"'" else "" if text[0] == "#" else text
