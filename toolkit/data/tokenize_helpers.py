"""Encode text into token ids in several processes, with results in order.

The helpers are fresh interpreters that import only this file and the tokenizer, never torch or the parent's
``__main__``. ``multiprocessing`` would import ``__main__``, and forking a parent with threads (torch, gloo,
CUDA) is not safe. A helper processes one chunk at a time and exits when its pipe closes, so it never outlives
its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, Pipe, wait

from toolkit.data.text_files import Chunk
from toolkit.data.tokenize import Encoded, Encoder
from toolkit.data.worker_signals import leave_to_parent
from toolkit.errors import DataError

AHEAD = 4  # chunks per process that may be encoded ahead of a slower earlier chunk


def encode_all(chunks: Iterator[Chunk], encode: Encoder, *, processes: int) -> Generator[Encoded, None, None]:
    """Encode all chunks, in order, with ``processes`` processes (1: this process).

    An error is raised when its chunk's turn comes, so it is the same for any number of processes.
    """
    if processes == 1:
        yield from map(encode, chunks)
        return
    yield from _encode_by(processes, chunks, encode)


def _encode_by(processes: int, chunks: Iterator[Chunk], encode: Encoder) -> Iterator[Encoded]:
    """Encode all chunks, in order, in helper processes.

    Memory is bounded by ``AHEAD`` chunks per process, regardless of the length of the corpus.
    """
    helpers = [Helper() for _ in range(processes)]
    try:
        for helper in helpers:
            helper.send(encode)
        yield from _in_order(chunks, helpers)
    finally:
        for helper in helpers:
            helper.stop()


def _in_order(chunks: Iterator[Chunk], helpers: list[Helper]) -> Iterator[Encoded]:
    idle, busy = list(helpers), dict[Helper, int]()
    results: dict[int, Encoded | Exception] = {}
    sent = done = 0
    more = True
    while True:
        while more and idle and sent - done < AHEAD * len(helpers):
            chunk = next(chunks, None)
            if chunk is None:
                more = False
                break
            helper = idle.pop()
            helper.send(chunk)
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
    """A tokenizing process and the pipe to it; it processes one chunk at a time."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from toolkit.data.tokenize_helpers import serve; serve({theirs.fileno()})"
        )
        # One thread per helper, since there is one helper per core.
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
            f"a tokenizing process {how}\n  fix:  if memory ran out, give the job more; otherwise start again"
        )

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int) -> None:
    """Run a helper: receive the encoder, then encode chunks until the pipe closes."""
    leave_to_parent()
    connection = Connection(descriptor)
    try:
        encode: Encoder = connection.recv()
        while True:
            chunk = connection.recv()
            try:
                answer: Encoded | Exception = encode(chunk)
            except DataError as error:
                answer = DataError(str(error))
            except Exception:
                answer = RuntimeError(f"a tokenizing process failed:\n{traceback.format_exc()}")
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
