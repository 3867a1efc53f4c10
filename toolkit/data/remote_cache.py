"""Token caches in object storage: uploaded while being built, read sample by sample.

    <cache URL>/tokens/<key>/                 the files of a cache, complete once meta.json exists
    <local cache>/remote/<key>/offsets.bin    copies of the small files, verified by their hashes
                              /conversations.bin, labels.bin

A run requests the tokens of a sample when it needs them and does not store them, so its memory and disk use
do not grow with the number of tokens. The starts of documents are needed for every sample and are therefore
copied to this machine, 8 bytes per document. A key identifies the content, and each file becomes visible only
when complete, so concurrent builds of a key write the same bytes. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import numpy as np
from numpy.typing import DTypeLike

from toolkit.data.cache_folder import local_cache
from toolkit.errors import DataError
from toolkit.io.block_hashes import BLOCK_BYTES, first_damaged
from toolkit.storage.remote_calls import StorageError
from toolkit.storage.remote_path import RemotePath

BY_RANGES = ("tokens.bin", "mask.bin", "weights.bin")
"""Files whose size grows with the number of tokens."""
REQUESTS_AT_ONCE = 16
"""Maximum number of samples of a micro-batch to request concurrently."""


class RemoteArray:
    """A 1D array stored in a file in object storage; each slice is read by one request."""

    def __init__(self, path: RemotePath, dtype: DTypeLike, n: int):
        self._path, self._n = path, n
        self.dtype = np.dtype(dtype)
        self.nbytes = n * self.dtype.itemsize

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read a slice. Raises DataError if the store does not answer, or the file was replaced."""
        start, stop, step = part.indices(self._n)
        assert step == 1
        values = np.empty(max(0, stop - start), self.dtype)
        read = 0
        with contextlib.suppress(FileNotFoundError):
            memory = values.view(np.uint8).data
            read = self._path.read_into(memory, start * self.dtype.itemsize) if len(memory) else 0
        if read != values.nbytes:
            raise DataError(f"{self._path} was removed or replaced while it was read\n  fix:  start again")
        return values

    @staticmethod
    def map(function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        """Apply ``function`` to all items concurrently; otherwise like the built-in ``map``."""
        return _threads(os.getpid()).map(function, items)


def remote_array(path: Path, dtype: DTypeLike, n: int, hashes: Sequence[str]) -> np.ndarray:
    """Open an array of length ``n`` in a cache file.

    Large files are read in byte ranges, by an object that supports slices like an array. Small files are
    copied to this machine and memory-mapped.

    Raises:
        DataError: The store does not answer, the hashes differ, or the copy cannot be written.
    """
    assert isinstance(path, RemotePath)
    if path.name in BY_RANGES:
        return cast(np.ndarray, RemoteArray(path, dtype, n))
    return np.asarray(np.memmap(_local_copy(path, n * np.dtype(dtype).itemsize, hashes), dtype, "r"))


def _local_copy(path: RemotePath, size: int, hashes: Sequence[str]) -> Path:
    """Return an intact local copy of a file of ``size`` bytes."""
    copy = local_cache() / "remote" / path.parent.name / path.name
    with contextlib.suppress(FileNotFoundError):
        if copy.stat().st_size == size and first_damaged(copy, hashes, every=False) is None:
            return copy
    work = copy.with_name(f"{copy.name}.{os.getpid()}")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, open(work, "wb") as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
        if first_damaged(work, hashes, every=True) is not None:
            raise DataError(f"{path} is damaged: its hashes differ")
        os.replace(work, copy)
    except OSError as error:
        raise DataError(
            f"{path} cannot be copied to {copy}: {error}\n  fix:  free {size:,} bytes there"
        ) from error
    finally:
        work.unlink(missing_ok=True)
    return copy


class RemoteBuilding:
    """A cache that is uploaded while being built; meta.json is uploaded last."""

    def __init__(self, folder: RemotePath):
        self._folder, self._names = folder, list[str]()

    def __enter__(self) -> RemoteBuilding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, StorageError):
            return  # a later build overwrites what a failing store retained
        if not (self._folder / "meta.json").exists():  # otherwise another process has completed it
            for name in self._names:
                (self._folder / name).unlink()

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        self._names.append(name)
        file: AbstractContextManager[IO[bytes]] = (self._folder / name).open("wb")
        return file

    def commit(self, meta: bytes) -> None:
        with self.create("meta.json") as file:
            file.write(meta)


@lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return this process's thread pool; a forked process does not inherit its parent's threads."""
    return ThreadPoolExecutor(REQUESTS_AT_ONCE, "samples")
