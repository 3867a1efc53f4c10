"""SHA-256 per block of a file: computed while writing, verified when reading."""

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
"""Number of blocks that a partial check reads, evenly spaced from first to last."""


class HashedFile:
    """A binary file open for writing; ``hashes()`` returns the hexadecimal SHA-256 of each block."""

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
            chunk, rest = rest[: self._room], rest[self._room :]
            self._blocks[-1].update(chunk)
            self._room -= len(chunk)

    def hashes(self) -> list[str]:
        return [block.hexdigest() for block in self._blocks]


def first_damaged(path: Path, hashes: Sequence[str], *, every: bool) -> int | None:
    """Return the offset of the first damaged block, or None. Checks ``every`` block, or else a sample."""
    last = len(hashes) - 1
    count = len(hashes) if every else min(SAMPLED, len(hashes))
    numbers = [last * index // max(1, count - 1) for index in range(count)]
    with ThreadPoolExecutor(cores()) as threads:
        matches = threads.map(lambda number: _hash(path, number) == hashes[number], numbers)
        damaged = (number for number, match in zip(numbers, matches, strict=True) if not match)
        return next((number * BLOCK_BYTES for number in damaged), None)


def _hash(path: Path, number: int) -> str:
    with path.open("rb") as file:
        file.seek(number * BLOCK_BYTES)
        return hashlib.sha256(file.read(BLOCK_BYTES)).hexdigest()
