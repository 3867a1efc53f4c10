"""The line of each key in a TOML file, which tomllib does not tell.

A scan for keys and brackets that trusts tomllib to have judged the syntax: it knows strings, comments,
headers, dotted keys, inline tables and arrays over several lines, and nothing of the values. On a file
that tomllib refuses it finds what comes before the fault, which is enough to name a key given twice.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Callable

Path = tuple[str, ...]

_BLANK = re.compile(r"[ \t]*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{1,2}(?!"))?'
    r"|'''.*?'''(?:'{1,2}(?!'))?"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> list[tuple[Path, int]]:
    """Return (key path, 1-based line) of each key and table header, in order of appearance."""
    scanner = _Scanner(text)
    with contextlib.suppress(_Stop):
        scanner.document()
    return scanner.found


class _Stop(Exception):
    """The text does not go on as TOML does."""


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.position = 0
        self.found: list[tuple[Path, int]] = []

    def document(self) -> None:
        prefix: Path = ()
        while True:
            self._skip(_SPACE)
            if self.position == len(self.text):
                return
            start = self.position
            if self.text[start] == "[":
                brackets = 2 if self.text.startswith("[[", start) else 1
                self.position += brackets
                prefix = self._key_path()
                self._expect("]" * brackets)
                self._record(prefix, start)
            else:
                self._pair(prefix)

    def _pair(self, prefix: Path) -> None:
        start = self.position
        path = prefix + self._key_path()
        self._expect("=")
        self._record(path, start)
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: Path) -> None:
        character = self.text[self.position : self.position + 1]
        if character == "{":
            self._items("}", lambda: self._pair(path))
        elif character == "[":
            self._items("]", lambda: self._value(path))
        elif character in ('"', "'"):
            self._take(_STRING)
        else:
            self._take(_SCALAR)

    def _items(self, close: str, item: Callable[[], None]) -> None:
        self.position += 1
        self._skip(_SPACE)
        while not self.text.startswith(close, self.position):
            item()
            self._skip(_SPACE)
            if self.text.startswith(",", self.position):
                self.position += 1
                self._skip(_SPACE)
            elif not self.text.startswith(close, self.position):
                raise _Stop
        self.position += 1

    def _key_path(self) -> Path:
        parts = []
        while True:
            self._skip(_BLANK)
            quoted = self.text[self.position : self.position + 1] in ('"', "'")
            part = self._take(_STRING if quoted else _BARE)
            parts.append(_unquote(part) if quoted else part)
            self._skip(_BLANK)
            if not self.text.startswith(".", self.position):
                return tuple(parts)
            self.position += 1

    def _record(self, path: Path, start: int) -> None:
        self.found.append((path, self.text.count("\n", 0, start) + 1))

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.position)
        assert match is not None  # both patterns match the empty string
        self.position = match.end()

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise _Stop
        self.position = match.end()
        return match.group()

    def _expect(self, token: str) -> None:
        self._skip(_BLANK)
        if not self.text.startswith(token, self.position):
            raise _Stop
        self.position += len(token)


def _unquote(part: str) -> str:
    try:
        value: str = tomllib.loads(f"key = {part}")["key"]
    except tomllib.TOMLDecodeError as error:
        raise _Stop from error
    return value
