"""Locks that say who writes; the kernel takes them from a process that ends. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = "run.lock"


def claim(folder: Path) -> IO[str]:
    """Make ``folder`` and lock it until the returned file is closed or this process ends.

    Raises:
        BlockingIOError: another process holds it; the text says which.
        OSError: the folder cannot be made or written to.
    """
    return _lock(folder / LOCK)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the lock ``path``, a file of which nothing is left afterwards; raises what :func:`claim` does."""
    file = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is released: whoever comes next makes another
        file.close()


@contextmanager
def locked(path: Path, doing: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive flock, once it is free; ``tell`` that whoever has it is ``doing`` something.

    The file stays: removing it would let two holders in.
    """
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for {_holder(file)} to finish {doing} ({path.with_suffix('')})")
            fcntl.flock(file, fcntl.LOCK_EX)
        _sign(file)
        yield


def _lock(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            file.close()
            raise BlockingIOError(holder) from None
        except OSError:
            pass  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()  # its holder removed it between the opening and the lock
    _sign(file)
    return file


def _sign(file: IO[str]) -> None:
    """Say in a lock that this process holds it."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
