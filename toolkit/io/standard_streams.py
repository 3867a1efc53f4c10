"""Standard output and error that never raise. Imports no torch.

``print``, and libraries that print, raise an error if the reader of a pipe exits, the terminal closes, the
disk of a log is full, or the encoding lacks a character such as "×". Output must not make a run fail.
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
    """A file descriptor whose writes never fail: unwritable data is dropped, and the loss is reported
    once."""

    def __init__(self, number: int, label: str):
        super().__init__(number, "w", closefd=False)
        self._label = label
        self._lost = False

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # any buffer
        try:
            while (written := super().write(data)) is None:  # a non-blocking descriptor is full
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._lost:
                self._lost = True
                _lost.append(f"{self._label} cannot be written: {error}")
                if self.fileno() != 2:
                    print(f"{_lost[-1]}; continuing without it", file=sys.stderr, flush=True)
            return len(data)


def protect(*, end_with_reader: bool = False) -> None:
    """Protect this process from errors of its output streams; characters missing from the encoding are
    escaped.

    With ``end_with_reader``, for programs that only print, exit silently when the reader of the output exits.
    """
    if end_with_reader:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout = _protected(sys.stdout, 1, "standard output")
    sys.stderr = _protected(sys.stderr, 2, "standard error")


def _protected(stream: TextIO | None, number: int, label: str) -> TextIO:
    if stream is None:  # closed by the parent process: the next opened file must not get its descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, number)
    unbuffered = getattr(stream, "write_through", False)  # python -u, with which ranks run
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(number, label)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=unbuffered or number == 2 or os.isatty(number),
    )


def exit_code(code: int) -> int:
    """Return the exit code of a program that only prints: nonzero if output was lost."""
    sys.stdout.flush()
    return code or int(bool(_lost))


def lost() -> str:
    """Return why the first lost stream cannot be written, or ""."""
    return _lost[0] if _lost else ""
