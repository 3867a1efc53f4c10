"""Encode text into token ids and report the progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np

from toolkit.data.text_files import Chunk
from toolkit.data.tokenizers.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """An encoded chunk: its ``tokens``, the ``lengths`` of its documents in tokens (int64), the chunk's
    attributes, ``extra`` arrays by file name, and ``remarks`` with the number of documents of each."""

    tokens: np.ndarray
    lengths: np.ndarray
    opens: bool
    closes: bool
    n_file_bytes: int
    extra: Mapping[str, np.ndarray] | None = None
    remarks: Mapping[str, int] | None = None


Encoder = Callable[[Chunk], Encoded]
"""Function that encodes a chunk; it is pickled to run in any process."""


@dataclass(frozen=True)
class TextEncoder:
    """Encodes documents as BOS (if the tokenizer adds it), text, EOS (if there is one)."""

    text_column: str
    tokenizer: Tokenizer
    dtype: str

    def __call__(self, chunk: Chunk) -> Encoded:
        texts, tokenizer = chunk.texts(self.text_column), self.tokenizer
        bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        parts = []
        for number, ids in enumerate(tokenizer.encode_batch(texts)):
            begins, ends = chunk.opens or number > 0, chunk.closes or number < len(texts) - 1
            parts.append(np.array(bos * begins + ids + eos * ends, dtype=self.dtype))
        tokens = np.concatenate(parts) if parts else np.zeros(0, self.dtype)
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return Encoded(tokens, lengths, chunk.opens, chunk.closes, chunk.n_file_bytes)


FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 15.0


class TokenizeBar:
    """Reports the tokenization progress of ``n_bytes`` of files to stderr, if ``shown``."""

    def __init__(self, name: str, n_bytes: int, processes: int, *, shown: bool):
        self.name, self.n_bytes, self.shown = name, n_bytes, shown
        self.done = self.n_tokens = 0
        self.start = time.monotonic()
        self._next_line = self.start + FIRST_LINE_SECONDS
        self._bar = None
        if not shown:
            return
        by = "this process" if processes == 1 else f"{processes} processes"
        print(f"tokenizing {name} ({n_bytes / 1e6:,.1f} MB) with {by}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=n_bytes, unit="B", unit_scale=True, leave=False, desc="tokenizing")

    def advance(self, n_bytes: int, n_tokens: int) -> None:
        """Report that ``n_bytes`` more of the files are finished, and that ``n_tokens`` in total are
        written."""
        self.done += n_bytes
        self.n_tokens = n_tokens
        if self._bar is not None:
            self._bar.update(n_bytes)
        elif self.shown and time.monotonic() >= self._next_line:
            seconds = time.monotonic() - self.start
            left = seconds * (self.n_bytes - self.done) / max(1, self.done)
            print(
                f"tokenizing: {self.done / 1e6:,.0f} of {self.n_bytes / 1e6:,.0f} MB, {n_tokens:,} tokens, "
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
                f"tokenized {self.n_tokens:,} tokens in {seconds:,.1f} s ({rate:,.0f} tokens/s)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
