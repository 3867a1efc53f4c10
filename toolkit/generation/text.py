"""Decode a stream of tokens into complete characters, with the spaces of the full text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 6
"""Number of earlier tokens to decode with the new ones, because the space before a word depends on the
previous token."""
MAX_CUT = 4
"""Maximum number of tokens per character; some tokenizers cannot decode from the middle of a character."""


class TextStream:
    """Streams the text after ``prompt``, without tokens that ``decode`` skips, such as special ones."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(prompt)
        self._emitted = len(self._ids)
        """Number of tokens whose text has been returned."""

    def add(self, token: int) -> str:
        """Return the text completed by ``token``, possibly empty."""
        self._ids.append(token)
        text = self._new()
        if text.endswith("\ufffd") and len(self._ids) - self._emitted < CONTEXT_TOKENS:
            return ""  # an incomplete character
        self._emitted = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the remaining text after the last token."""
        text, self._emitted = self._new(), len(self._ids)
        return text

    def _new(self) -> str:
        for before in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CUT):
            first = max(0, self._emitted - before)
            before_text = self._decode(self._ids[first : self._emitted])
            if not before_text.startswith("\ufffd"):
                break
        return self._decode(self._ids[first:])[len(before_text) :]
