"""Read regions of contiguous tensors in files, with ``preadv``, into existing memory.

mmap is not used, because its pages count as this process's memory and are faulted in 4 KiB at a time. Full
rows are read directly into the destination; regions that slice columns or permute rows go through a buffer.
"""

from __future__ import annotations

import io
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.io.pickles import PickleCheck

if TYPE_CHECKING:
    from typing_extensions import Buffer

Region = Sequence[slice]
"""A slice with start and stop, without step, per dimension."""
Read = Callable[[memoryview, int], int]
"""Function that reads from a file at an offset into memory, and returns the number of bytes."""

_MAX_PICKLE = 100_000_000
BUFFER_BYTES = 8 << 20
"""Size of the buffer, unless one row or head is larger; it fits in a CPU cache."""


@dataclass(frozen=True)
class TensorPlace:
    """Location of a tensor: at the byte offset ``begin`` of ``file``."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FilePart(io.RawIOBase):
    """A byte range of an open file, with the interface of a file."""

    def __init__(self, file: IO[bytes], begin: int, length: int):
        self._file, self._begin, self._length = file, begin, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        self._file.seek(self._begin + self._at)
        left = max(0, self._length - self._at)
        data = self._file.read(min(memoryview(buffer).nbytes, left))
        memoryview(buffer)[: len(data)] = data
        self._at += len(data)
        return len(data)


class SavedFile:
    """A file written by torch.save, read from ``stream``: all of ``file``, or its part that starts at
    ``begin``.

    Raises:
        BadZipFile: it was not written by torch 1.6 or later.
    """

    def __init__(self, file: Path, stream: IO[bytes], *, begin: int = 0):
        self._file, self._begin, self._stream = file, begin, stream
        self._records = sorted(ZipFile(stream).infolist(), key=lambda record: record.header_offset)
        self._headers = [record.header_offset for record in self._records]

    def load(self) -> Any:
        """Load the file with its tensors on the meta device: names, shapes and offsets, but no elements.

        Raises:
            UnpicklingError: it contains objects other than tensors.
            Exception: of any type, for a damaged file.
        """
        for record in self._records:
            if record.filename.endswith(".pkl"):
                if record.file_size > _MAX_PICKLE:
                    raise UnpicklingError(f"it has a pickle of {record.file_size:,} bytes")
                with ZipFile(self._stream) as archive, archive.open(record) as pickle:
                    pickle._expected_crc = None  # type: ignore[attr-defined]  # checkpoints have none
                    PickleCheck(pickle).load()
        self._stream.seek(0)
        return torch.load(self._stream, map_location="meta", weights_only=True)

    def place(self, tensor: Tensor) -> TensorPlace:
        """Locate the elements of a ``tensor`` that :meth:`load` created on the meta device.

        Raises:
            ValueError: it is not contiguous, or larger than its stored data.
        """
        strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        storage = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if strided else None
        if storage is None or not tensor.is_contiguous():
            raise ValueError("it is not contiguous")
        record = self._records[bisect_right(self._headers, storage) - 1]
        first, size = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        if record.compress_type != ZIP_STORED or first + size > record.file_size:
            raise ValueError(f"it should have {first + size:,} bytes, but {record.file_size:,} are stored")
        return TensorPlace(self._file, self._begin + storage + first, tuple(tensor.shape), tensor.dtype)


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(it.stop - it.start for it in region)


def new_output(shape: tuple[int, ...], dtype: torch.dtype, region: Region, out: Tensor | None) -> Tensor:
    """Check ``out``, or allocate it, for a region of a tensor."""
    inside = len(region) == len(shape) and all(
        0 <= it.start <= it.stop <= size for it, size in zip(region, shape, strict=True)
    )
    assert inside, f"{region} is not a region of {shape}"
    if out is None:
        return torch.empty(region_shape(region), dtype=dtype)
    assert out.shape == region_shape(region) and out.dtype == dtype and out.is_contiguous()
    return out


def read_region(place: TensorPlace, region: Region, out: Tensor, *, paired_rows: int = 0) -> Tensor:
    """Read a region of the tensor at ``place`` into the contiguous ``out``, and return it.

    With ``paired_rows``, the file stores each group of that many rows (a head) with our even rows first, then
    the odd ones.

    Raises:
        DataError: the file cannot be read or ends too early.
    """
    if not out.numel():
        return out
    if not isinstance(place.file, Path):
        return _read_region(place.file.read_into, place, region, out, paired_rows)
    try:
        descriptor = os.open(place.file, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{place.file} cannot be read: {error.strerror}") from None
    try:
        read = partial(_preadv, descriptor)
        return _read_region(read, place, region, out, paired_rows)
    finally:
        os.close(descriptor)


def _preadv(descriptor: int, memory: memoryview, offset: int) -> int:
    if not hasattr(os, "preadv"):  # before macOS 11
        data = os.pread(descriptor, len(memory), offset)
        memory[: len(data)] = data
        return len(data)
    return os.preadv(descriptor, [memory], offset)


def _read_region(read: Read, place: TensorPlace, region: Region, out: Tensor, paired_rows: int) -> Tensor:
    if not place.shape or (not paired_rows and tuple(region[1:]) == whole(place.shape[1:])):
        row = math.prod(place.shape[1:]) * place.dtype.itemsize
        _fill(read, place, place.begin + (region[0].start * row if place.shape else 0), out)
    else:
        _read_buffered(read, place, region, out, paired_rows)
    return out


def _read_buffered(read: Read, place: TensorPlace, region: Region, out: Tensor, paired_rows: int) -> None:
    """Read full groups of rows into a buffer, and copy the region out of it."""
    rest = place.shape[1:]
    row = math.prod(rest) * place.dtype.itemsize
    group = paired_rows or 1
    rows, columns = region[0], tuple(region[1:])
    step = max(1, BUFFER_BYTES // (row * group)) * group
    first, last = rows.start // group * group, -(-rows.stop // group) * group
    buffer = torch.empty((min(step, last - first), *rest), dtype=place.dtype)
    for start in range(first, last, step):
        stop = min(start + step, last)
        block = buffer[: stop - start]
        _fill(read, place, place.begin + start * row, block)
        begin, end = max(start, rows.start), min(stop, rows.stop)
        target = out[begin - rows.start : end - rows.start]
        if paired_rows:
            block = block.unflatten(0, (-1, 2, group // 2)).transpose(1, 2)
            if (begin, end) == (start, stop):
                target = target.unflatten(0, (-1, group // 2, 2))
                pairs = (slice(None), slice(None), slice(None), *columns)
                target.copy_(block[pairs])
                continue
            block = block.flatten(0, 2)
        part = (slice(begin - start, end - start), *columns)
        target.copy_(block[part])


def _fill(read: Read, place: TensorPlace, offset: int, out: Tensor) -> None:
    memory = memoryview(out.view(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(memory):
        try:
            count = read(memory[done:], offset + done)
        except OSError as error:
            raise DataError(f"{place.file} cannot be read: {error.strerror}") from None
        if not count:
            raise DataError(f"{place.file} ends {len(memory) - done:,} bytes too early")
        done += count
