"""Standard output and error that no reader, disk or encoding can break. Imports no torch.

``print`` raises when the reader of a pipe has gone, the terminal has closed, the disk of a log is full, or
the encoding has no "×"; so do libraries that print. A run must not end of what it says of itself.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from typing import TextIO

_lost: list[str] = []


class _Descriptor(io.FileIO):
    """A file descriptor to which writing never fails: what it does not take is dropped, and told once."""

    def __init__(self, number: int, called: str):
        super().__init__(number, "w", closefd=False)
        self._called = called
        self._lost = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # any buffer
        try:
            while (written := super().write(data)) is None:  # full, where writing does not wait
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._lost:
                self._lost = True
                _lost.append(f"{self._called} cannot be written: {error}")
                if self.fileno() != 2:
                    print(f"{_lost[-1]}; going on without it", file=sys.stderr, flush=True)
            return len(data)


def protect(*, end_with_reader: bool = False) -> None:
    """Have this process outlive what it prints to; a character that the encoding lacks is printed as "\\xd7".

    ``end_with_reader``: a program that makes nothing but its output ends silently with its reader, as `head`.
    """
    if end_with_reader:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout = _protected(sys.stdout, 1, "standard output")
    sys.stderr = _protected(sys.stderr, 2, "standard error")


def _protected(stream: TextIO | None, number: int, called: str) -> TextIO:
    if stream is None:  # closed by whoever started us: the next file to be opened must not take its place
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
    unbuffered = getattr(stream, "write_through", False)  # python -u, as ranks run: no word is left unsaid
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(number, called)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=unbuffered or number == 2 or os.isatty(number),
    )


def exit_code(code: int) -> int:
    """The exit code of a program that makes nothing but its output: not 0 where some of that is lost."""
    sys.stdout.flush()
    return code or int(bool(_lost))


def lost() -> str:
    """Say why the first stream that was lost cannot be written; empty while none is."""
    return _lost[0] if _lost else ""
