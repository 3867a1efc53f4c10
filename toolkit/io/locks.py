"""File locks that record their holder; the kernel releases them when a process ends. Imports no torch."""

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
    """Create ``folder`` and lock it until the returned file is closed or this process ends.

    Raises:
        BlockingIOError: another process, named in the message, has the lock.
        OSError: the folder cannot be created or written to.
    """
    return _lock(folder / LOCK)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` inside the context, then remove it; raises errors as :func:`claim` does."""
    file = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # removed before release, so that the next holder creates a new file
        file.close()


@contextmanager
def waiting_lock(path: Path, task: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait for an exclusive flock and hold it inside the context. While waiting, ``say`` that its holder is
    busy with ``task``.

    The file is not removed, because that would allow two holders.
    """
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {_holder(file)} to finish {task} ({path.with_suffix('')})")
            fcntl.flock(file, fcntl.LOCK_EX)
        _record_holder(file)
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
            pass  # the file system does not support locks
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                break
        file.close()  # its holder removed it after it was opened
    _record_holder(file)
    return file


def _record_holder(file: IO[str]) -> None:
    """Write to a lock file that this process holds the lock."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
