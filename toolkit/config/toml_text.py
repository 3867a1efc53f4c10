"""Safe parsing of TOML: run time and memory are bounded for any input."""

from __future__ import annotations

import re
from typing import Any

from toolkit.compat import tomllib

MAX_LENGTH = 1_000_000
"""Maximum characters of a document; the longest configuration has some 20,000."""
MAX_DEPTH = 20
"""Maximum parts of a key; ours have up to 5. The run time of tomllib is quadratic in them."""
LEXEMES = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[][{}\n]''',
    re.DOTALL,
)
"""Brackets and line ends, and what may contain them: strings, possibly unterminated, and comments."""
_LONG_KEY = re.compile(rf"(?<![\w \t.-])(?:[\w \t-]*\.){{{MAX_DEPTH}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a document.

    Raises:
        ValueError: It is not TOML, too long, nested too deeply, or has a key of more than :data:`MAX_DEPTH`
            parts. The message ends with the position, as in tomllib.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it has more than {MAX_LENGTH:,} characters")
    if line := _line_of_long_key(text):
        raise ValueError(f"a key of more than {MAX_DEPTH} parts (at line {line}, column 1)")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _line_of_long_key(text: str) -> int:
    if text.count(".") < MAX_DEPTH:
        return 0
    plain = LEXEMES.sub(_without_content, text)
    match = _LONG_KEY.search(plain)
    return plain.count("\n", 0, match.end()) + 1 if match else 0


def _without_content(lexeme: re.Match[str]) -> str:
    """Replace a string by a word with the same number of line ends, and a comment by an empty string."""
    text = lexeme[0]
    return "_" + "\n" * text.count("\n") if text[0] in "\"'" else "" if text[0] == "#" else text
