"""The SHA-256 of each block of a file: noted while it is written, compared when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from toolkit.hardware import cores

BLOCK_BYTES = 4 << 20
SAMPLED = 8
"""Blocks that a look reads of a file, from its first to its last: all of a small one."""


class HashedFile:
    """A binary file open for writing; ``hashes()`` is a hexadecimal SHA-256 for each block of it."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._blocks = [hashlib.sha256()]
        self._room = BLOCK_BYTES

    def write(self, data: np.ndarray | bytes) -> None:
        rest = np.frombuffer(data, np.uint8).data
        self._file.write(rest)
        while len(rest):
            if not self._room:
                self._blocks.append(hashlib.sha256())
                self._room = BLOCK_BYTES
            part, rest = rest[: self._room], rest[self._room :]
            self._blocks[-1].update(part)
            self._room -= len(part)

    def hashes(self) -> list[str]:
        return [block.hexdigest() for block in self._blocks]


def first_damaged(path: Path, hashes: Sequence[str], *, every: bool) -> int | None:
    """Find the byte where the first damaged block begins, of ``every`` block or of some."""
    last = len(hashes) - 1
    count = len(hashes) if every else min(SAMPLED, len(hashes))
    looked_at = [last * index // max(1, count - 1) for index in range(count)]
    with ThreadPoolExecutor(cores()) as threads:
        found = threads.map(lambda number: _hash(path, number) == hashes[number], looked_at)
        damaged = (number for number, sound in zip(looked_at, found, strict=True) if not sound)
        return next((number * BLOCK_BYTES for number in damaged), None)


def _hash(path: Path, number: int) -> str:
    with path.open("rb") as file:
        file.seek(number * BLOCK_BYTES)
        return hashlib.sha256(file.read(BLOCK_BYTES)).hexdigest()
