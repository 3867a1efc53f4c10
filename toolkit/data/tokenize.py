"""Turning pieces of text into token ids, and telling how far that is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np

from toolkit.data.text_files import Piece
from toolkit.data.tokenizers.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """A piece's ``tokens``, the ``lengths`` of its documents in tokens (int64), what it said of itself,
    what else is kept of it, by the names of files, and what a user should know of how many documents."""

    tokens: np.ndarray
    lengths: np.ndarray
    opens: bool
    closes: bool
    n_file_bytes: int
    extra: Mapping[str, np.ndarray] | None = None
    remarks: Mapping[str, int] | None = None


Encoder = Callable[[Piece], Encoded]
"""Tokens of a piece, by any process: it is pickled."""


@dataclass(frozen=True)
class TextEncoder:
    """Each document is BOS (where the tokenizer adds it), its text, EOS (if any)."""

    text_column: str
    tokenizer: Tokenizer
    dtype: str

    def __call__(self, piece: Piece) -> Encoded:
        texts, tokenizer = piece.texts(self.text_column), self.tokenizer
        bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        parts = []
        for number, ids in enumerate(tokenizer.encode_batch(texts)):
            begins, ends = piece.opens or number > 0, piece.closes or number < len(texts) - 1
            parts.append(np.array(bos * begins + ids + eos * ends, dtype=self.dtype))
        tokens = np.concatenate(parts) if parts else np.zeros(0, self.dtype)
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return Encoded(tokens, lengths, piece.opens, piece.closes, piece.n_file_bytes)


FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 15.0


class TokenizeBar:
    """Reports to stderr while tokenising ``n_bytes`` of files; silent where not ``shown``."""

    def __init__(self, name: str, n_bytes: int, processes: int, *, shown: bool):
        self.name, self.n_bytes, self.shown = name, n_bytes, shown
        self.done = self.n_tokens = 0
        self.start = time.monotonic()
        self._next_line = self.start + FIRST_LINE_SECONDS
        self._bar = None
        if not shown:
            return
        by = "this process" if processes == 1 else f"{processes} processes"
        print(f"tokenising {name} ({n_bytes / 1e6:,.1f} MB) by {by}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=n_bytes, unit="B", unit_scale=True, leave=False, desc="tokenising")

    def advance(self, n_bytes: int, n_tokens: int) -> None:
        """``n_bytes`` more of the files are done; ``n_tokens`` have been written so far."""
        self.done += n_bytes
        self.n_tokens = n_tokens
        if self._bar is not None:
            self._bar.update(n_bytes)
        elif self.shown and time.monotonic() >= self._next_line:
            seconds = time.monotonic() - self.start
            left = seconds * (self.n_bytes - self.done) / max(1, self.done)
            print(
                f"tokenising: {self.done / 1e6:,.0f} of {self.n_bytes / 1e6:,.0f} MB, {n_tokens:,} tokens, "
                f"about {left:,.0f} s left",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> TokenizeBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.shown and error is None:
            seconds = time.monotonic() - self.start
            rate = self.n_tokens / max(seconds, 1e-9)
            print(
                f"tokenised {self.n_tokens:,} tokens in {seconds:,.1f} s ({rate:,.0f} tokens/s)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
