"""Turning pieces of text into token ids, by this process or by several, the results in order.

The helpers are fresh interpreters that import this file and what the tokenizer needs, never torch and
never the parent's ``__main__``; ``multiprocessing`` would do the latter, and forking a parent that has
threads (torch, gloo, CUDA) is not safe. A helper holds one piece at a time, ends when its pipe closes,
and so never outlives its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import NamedTuple

import numpy as np

from toolkit.data.text_files import Piece
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

AHEAD = 4  # pieces that may wait, a process, for an earlier one that takes longer


class Encoded(NamedTuple):
    """A piece's ``tokens``, the ``lengths`` of its documents in tokens (int64), what it said of itself, and
    what else is kept of it, by the names of files."""

    tokens: np.ndarray
    lengths: np.ndarray
    opens: bool
    closes: bool
    n_file_bytes: int
    extra: Mapping[str, np.ndarray] | None = None


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


def encode_all(pieces: Iterator[Piece], encode: Encoder, *, processes: int) -> Generator[Encoded, None, None]:
    """Encode every piece, in order, by ``processes`` (1: this one).

    Memory is bounded by ``AHEAD`` pieces a process, however long the corpus. An error is raised when the
    turn of its piece comes, so that it is the same one for any number of processes.
    """
    if processes == 1:
        yield from map(encode, pieces)
        return
    helpers = [_Helper() for _ in range(processes)]
    try:
        for helper in helpers:
            helper.send(encode)
        yield from _in_order(pieces, helpers)
    finally:
        for helper in helpers:
            helper.stop()


def _in_order(pieces: Iterator[Piece], helpers: list[_Helper]) -> Iterator[Encoded]:
    idle, busy = list(helpers), dict[_Helper, int]()
    results: dict[int, Encoded | Exception] = {}
    sent = done = 0
    more = True
    while True:
        while more and idle and sent - done < AHEAD * len(helpers):
            piece = next(pieces, None)
            if piece is None:
                more = False
                break
            helper = idle.pop()
            helper.send(piece)
            busy[helper] = sent
            sent += 1
        if not busy:
            return
        answered = wait([helper.connection for helper in busy])
        for helper in [helper for helper in busy if helper.connection in answered]:
            results[busy.pop(helper)] = helper.receive()
            idle.append(helper)
        while done in results:
            result = results.pop(done)
            if isinstance(result, Exception):
                raise result
            yield result
            done += 1


class _Helper:
    """One tokenising process and the pipe to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from toolkit.data.tokenize import serve; serve({theirs.fileno()})"
        )
        # One thread each: there are as many helpers as cores.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._died() from None

    def receive(self) -> Encoded | Exception:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> DataError:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return DataError(
            f"a tokenising process {how}\n  fix:  if memory ran out, give the job more; otherwise start again"
        )

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int) -> None:
    """The life of a helper: the encoder first, then pieces, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(descriptor)
    try:
        encode: Encoder = connection.recv()
        while True:
            piece = connection.recv()
            try:
                answer: Encoded | Exception = encode(piece)
            except DataError as error:
                answer = DataError(str(error))
            except Exception:
                answer = RuntimeError(f"a tokenising process failed:\n{traceback.format_exc()}")
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


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
