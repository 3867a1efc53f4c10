"""Text as its tokens come: no character before all of its bytes, and spaces as the whole text has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

BEFORE = 6
"""Tokens decoded before new ones, where a character begins with them. A word's space depends on what is
before it."""
CUT = 4
"""Tokens that a character may be cut in. Of some tokenizers none that follows a part of one can be read."""


class TextStream:
    """The text that follows ``prompt``, piece by piece; what ``decode`` leaves out, as special tokens, is not
    in it."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(prompt)
        self._told = len(self._ids)
        """Tokens whose text was handed out."""

    def add(self, token: int) -> str:
        """The text that ``token`` completes, which may be none."""
        self._ids.append(token)
        text = self._new()
        if text.endswith("\ufffd") and len(self._ids) - self._told < BEFORE:
            return ""  # a character of which bytes are to come
        self._told = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text held back, when no token is to come."""
        text, self._told = self._new(), len(self._ids)
        return text

    def _new(self) -> str:
        for before in range(BEFORE, BEFORE + CUT):
            first = max(0, self._told - before)
            told = self._decode(self._ids[first : self._told])
            if not told.startswith("\ufffd"):
                break
        return self._decode(self._ids[first:])[len(told) :]
