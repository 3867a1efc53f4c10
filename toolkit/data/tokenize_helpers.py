"""Turning pieces of text into token ids by several processes, the results in order.

The helpers are fresh interpreters that import this file and what the tokenizer needs, never torch and
never the parent's ``__main__``; ``multiprocessing`` would do the latter, and forking a parent that has
threads (torch, gloo, CUDA) is not safe. A helper holds one piece at a time, ends when its pipe closes,
and so never outlives its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, Pipe, wait

from toolkit.data.text_files import Piece
from toolkit.data.tokenize import Encoded, Encoder
from toolkit.data.worker_signals import leave_to_parent
from toolkit.errors import DataError

AHEAD = 4  # pieces that may wait, a process, for an earlier one that takes longer


def encode_all(pieces: Iterator[Piece], encode: Encoder, *, processes: int) -> Generator[Encoded, None, None]:
    """Encode every piece, in order, by ``processes`` (1: this one).

    An error is raised when the turn of its piece comes, so that it is the same one for any number of
    processes.
    """
    if processes == 1:
        yield from map(encode, pieces)
        return
    yield from _encode_by(processes, pieces, encode)


def _encode_by(processes: int, pieces: Iterator[Piece], encode: Encoder) -> Iterator[Encoded]:
    """Encode every piece, in order, by so many processes.

    Memory is bounded by ``AHEAD`` pieces a process, however long the corpus.
    """
    helpers = [Helper() for _ in range(processes)]
    try:
        for helper in helpers:
            helper.send(encode)
        yield from _in_order(pieces, helpers)
    finally:
        for helper in helpers:
            helper.stop()


def _in_order(pieces: Iterator[Piece], helpers: list[Helper]) -> Iterator[Encoded]:
    idle, busy = list(helpers), dict[Helper, int]()
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


class Helper:
    """A tokenising process and the pipe to it; it holds one piece at a time."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from toolkit.data.tokenize_helpers import serve; serve({theirs.fileno()})"
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
    leave_to_parent()
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
