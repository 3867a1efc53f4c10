"""Regions of tensors that lie row after row in a file, read by ``preadv`` into memory that is there already.

Not by a mapping, whose pages count as this process's memory and are faulted in four KiB at a time. Whole
rows go straight to their place; what cuts columns, or has its rows in another order, goes by a buffer.
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
"""A slice with a start and a stop, without a step, for each dimension."""
Read = Callable[[memoryview, int], int]
"""Fills memory with what a file has from an offset on, and returns how many bytes that were."""

_MAX_PICKLE = 100_000_000
BUFFER_BYTES = 8 << 20
"""Size of the buffer, unless one row, or one head, has more. Small enough to stay in a processor's cache."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: ``begin`` counts bytes from the start of ``file``."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FilePart(io.RawIOBase):
    """Some bytes of an open file, as a file of their own."""

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
        room = max(0, self._length - self._at)
        data = self._file.read(min(memoryview(buffer).nbytes, room))
        memoryview(buffer)[: len(data)] = data
        self._at += len(data)
        return len(data)


class SavedFile:
    """A file of torch.save, read as ``stream``: ``file`` itself, or the part of it that starts at ``begin``.

    Raises:
        BadZipFile: it was not torch, or one of before 1.6.
    """

    def __init__(self, file: Path, stream: IO[bytes], *, begin: int = 0):
        self._file, self._begin, self._stream = file, begin, stream
        self._records = sorted(ZipFile(stream).infolist(), key=lambda record: record.header_offset)
        self._headers = [record.header_offset for record in self._records]

    def load(self) -> Any:
        """Load the file, its tensors on the meta device: names, shapes and places, and no numbers.

        Raises:
            UnpicklingError: it holds more than tensors.
            Exception: of any kind, for what is damaged.
        """
        for record in self._records:
            if record.filename.endswith(".pkl"):
                if record.file_size > _MAX_PICKLE:
                    raise UnpicklingError(f"it has a pickle of {record.file_size:,} bytes")
                with ZipFile(self._stream) as archive, archive.open(record) as pickle:
                    pickle._expected_crc = None  # type: ignore[attr-defined]  # checkpoints are without
                    PickleCheck(pickle).load()
        self._stream.seek(0)
        return torch.load(self._stream, map_location="meta", weights_only=True)

    def place(self, tensor: Tensor) -> TensorPlace:
        """Find where the numbers of a ``tensor`` lie that torch.load has put on the meta device.

        Raises:
            ValueError: its rows do not follow one another, or it is larger than what is stored of it.
        """
        strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        storage = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if strided else None
        if storage is None or not tensor.is_contiguous():
            raise ValueError("its rows do not follow one another")
        record = self._records[bisect_right(self._headers, storage) - 1]
        first, size = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        if record.compress_type != ZIP_STORED or first + size > record.file_size:
            raise ValueError(
                f"{first + size:,} bytes are said to be there, and {record.file_size:,} are stored"
            )
        return TensorPlace(self._file, self._begin + storage + first, tuple(tensor.shape), tensor.dtype)


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(cut.stop - cut.start for cut in region)


def new_output(shape: tuple[int, ...], dtype: torch.dtype, region: Region, out: Tensor | None) -> Tensor:
    """``out``, or memory for a region of a tensor, after a look at whether they fit one another."""
    inside = len(region) == len(shape) and all(
        0 <= cut.start <= cut.stop <= size for cut, size in zip(region, shape, strict=True)
    )
    assert inside, f"{region} is no region of {shape}"
    if out is None:
        return torch.empty(region_shape(region), dtype=dtype)
    assert out.shape == region_shape(region) and out.dtype == dtype and out.is_contiguous()
    return out


def read_region(place: TensorPlace, region: Region, out: Tensor, *, paired_rows: int = 0) -> Tensor:
    """``out``, contiguous, filled with a region of the tensor at ``place``.

    With ``paired_rows`` the file has, in every group of so many rows (a head), those that we keep at even
    places first and those at odd places after them.

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
    return os.preadv(descriptor, [memory], offset)


def _read_region(read: Read, place: TensorPlace, region: Region, out: Tensor, paired_rows: int) -> Tensor:
    if not place.shape or (not paired_rows and tuple(region[1:]) == whole(place.shape[1:])):
        row = math.prod(place.shape[1:]) * place.dtype.itemsize
        _fill(read, place, place.begin + (region[0].start * row if place.shape else 0), out)
    else:
        _read_by_buffer(read, place, region, out, paired_rows)
    return out


def _read_by_buffer(read: Read, place: TensorPlace, region: Region, out: Tensor, paired_rows: int) -> None:
    """Whole groups of rows into a buffer, and what the region has of them to their place."""
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
