"""Durable writes of file contents and folder entries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def sync_file(file: IO) -> None:
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, after files were created, renamed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
