"""The folder of a run, which one run at a time may write to. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from toolkit.config import Config

LOCK = "run.lock"


def claim(folder: Path) -> IO[str]:
    """Make ``folder`` and lock it until the returned file is closed or this process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it; the text says which.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise BlockingIOError(holder) from None
    except OSError:
        pass  # a file system without locks
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def traces_prefix(config: Config) -> Path:
    """What the names of the files begin with in which ranks tell of failed collectives."""
    folder = Path(config.job.dump_folder).expanduser() / config.comm.save_traces_folder
    return folder / config.comm.save_traces_file_prefix
