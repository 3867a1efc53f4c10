"""Writes that survive a power cut: of the contents of a file, and of the names in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def sync_file(file: IO) -> None:
    """Bring all that was written to an open file onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk: files made, renamed or removed there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
