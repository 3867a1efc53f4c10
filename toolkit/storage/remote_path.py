"""Files in object storage, by the names and methods of ``pathlib`` that weights and checkpoints need.

A :class:`RemotePath` is no ``os.PathLike``: what knows files of this machine alone refuses it, and no folder
``s3:`` comes to be. Any fsspec file system serves that lists, reads ranges and writes.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from toolkit.errors import redact
from toolkit.storage.remote_calls import StorageError, again, file_system, run_call
from toolkit.storage.urls import url_problem

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

RANGE, RANGES_AT_ONCE = 16 << 20, 8
"""Bytes of a request of a large read, and how many such requests run at once."""
_FIRST_BLOCK, _LAST_BLOCK = 64 << 10, 64 << 20
"""Bytes that a file which is read from anywhere asks for at once, and one that is read through."""
PART = 64 << 20
"""Bytes of a part of an upload, of which S3 takes 10,000."""
TRIES = 28
"""Tries of a part: with s3fs's pauses of up to 15 s, about 5 minutes."""


class RemotePath:
    """``scheme://bucket/name``. A folder is there while a file is in it; making one does nothing.

    Raises:
        StorageError: by every method that asks the store.
    """

    reads = False
    """Also of what is no store: the hub, a web address."""

    def __init__(self, url: str):
        if problem := url_problem(url, storage="read" if self.reads else True):
            raise StorageError(f"{redact(url)}: {problem[0]}\n  fix:  {problem[1]}")
        self.scheme, _, rest = url.partition("://")
        self._names = tuple(name for name in rest.split("/") if name)

    def _of(self, *names: str) -> Self:
        other = object.__new__(type(self))  # unchecked: a listing may have any names
        other.scheme, other._names = self.scheme, names
        return other

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self._names)}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> RemotePath:
        return self._of(*self._names, *name.split("/"))

    @property
    def file_system(self) -> Any:
        """fsspec's file system of the scheme."""
        return file_system(self.scheme, os.getpid())

    @property
    def name(self) -> str:
        return self._names[-1] if len(self._names) > 1 else ""

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return self._of(*self._names[: max(1, len(self._names) - 1)])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def resolve(self) -> RemotePath:
        return self

    # Looking

    def stat(self) -> Any:
        """``st_size``, ``st_mode``, and a ``st_mtime_ns`` that tells a file from what was there before.

        Raises:
            FileNotFoundError: nothing has this name.
        """
        found = self._call("info", str(self))
        kind = stat.S_IFDIR if found["type"] == "directory" else stat.S_IFREG
        state = f"{found.get('ETag')} {found.get('LastModified')} {found.get('mtime')}"
        changed = int.from_bytes(blake2b(state.encode(), digest_size=7).digest(), "big")
        return SimpleNamespace(st_size=found["size"], st_mode=kind | 0o644, st_mtime_ns=changed)

    def exists(self) -> bool:
        with suppress(FileNotFoundError):
            self.stat()
            return True
        return False

    def is_file(self) -> bool:
        with suppress(FileNotFoundError):
            return stat.S_ISREG(self.stat().st_mode)
        return False

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        try:
            found = self._call("ls", f"{self}/", detail=False)
        except FileNotFoundError:
            return
        own = self.file_system._strip_protocol(str(self)).strip("/")  # which some stores list, too
        paths = {path.strip("/") for path in found} - {own, ""}
        yield from (self / name for name in sorted(path.rpartition("/")[2] for path in paths))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Paths whose names match, one by one, what is between the slashes of ``pattern``."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    # Reading

    def open_regular(self) -> io.BufferedReader:
        """The file, to be read from anywhere in it; see :func:`toolkit.config.local_paths.open_regular`."""
        return io.BufferedReader(_Reader(self, self.stat().st_size), _FIRST_BLOCK)

    def open(self, mode: str = "rb") -> Any:
        """The file to be read, or with ``"wb"`` one to be written, which is there once it is closed."""
        if mode == "rb":
            return self.open_regular()
        assert mode == "wb", "the store knows bytes"
        return Upload(self)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on, by a few requests at once; how many."""

        def one(begin: int) -> int:
            part = memory[begin : begin + RANGE]
            content = self._call("cat_file", str(self), start=offset + begin, end=offset + begin + len(part))
            if len(content) > len(part):
                raise StorageError(f"{self}: the server sends whole files where a part is asked for")
            part[: len(content)] = content
            return len(content)

        begins = range(0, len(memory), RANGE)
        if len(begins) == 1:
            return one(0)
        return sum(_threads(os.getpid()).map(one, begins))

    # Writing

    def write_new(self, content: bytes) -> None:
        """Write a small file that is not there; whole, by one request.

        Raises:
            FileExistsError: it is there already, with another content.
        """
        exclusive = (
            {"mode": "create"} if hasattr(self.file_system, "call_s3") or self.scheme in ("gs", "gcs") else {}
        )
        try:
            self._call("pipe_file", str(self), content, **exclusive)
        except FileExistsError:
            if self.read_bytes() != content:  # else it is our own, of a try whose answer was lost
                raise

    def read_bytes(self) -> bytes:
        content: bytes = self._call("cat_file", str(self))
        return content

    def unlink(self, missing_ok: bool = True) -> None:
        with suppress(FileNotFoundError):
            self._call("rm_file", str(self))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        pass

    def remove_tree(self, *, first: tuple[str, ...] = ()) -> None:
        """Delete all that lies under this name, the files ``first`` before any other."""
        for name in first:
            (self / name).unlink()
        for path in self.iterdir():
            path.remove_tree()
            path.unlink()

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        fs = self.file_system
        return again(lambda: run_call(fs, method, *args, **options), str(self))


class _Reader(io.RawIOBase):
    """Bytes of a file by blocks, of which the last are kept; who reads on gets larger ones."""

    def __init__(self, path: RemotePath, size: int):
        self._path, self._size, self._at = path, size, 0
        self._blocks: list[tuple[int, memoryview]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        memory = memoryview(buffer).cast("B")
        if self._at >= self._size or not memory:
            return 0
        begin, block = self._block()
        part = block[self._at - begin : self._at - begin + len(memory)]
        memory[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self) -> tuple[int, memoryview]:
        """The block with the byte that is next."""
        begin, length = self._at // _FIRST_BLOCK * _FIRST_BLOCK, _FIRST_BLOCK
        for start, block in self._blocks:
            if start <= self._at < start + len(block):
                return start, block
            if start + len(block) == self._at:
                begin, length = self._at, min(4 * len(block), _LAST_BLOCK)
        memory = memoryview(bytearray(min(length, self._size - begin)))
        if self._path.read_into(memory, begin) != len(memory):
            raise StorageError(f"{self._path} was replaced while it was read")
        kept = 7 if length == _FIRST_BLOCK else 1
        self._blocks = [*self._blocks[-kept:], (begin, memory)]
        return begin, memory


@lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RANGES_AT_ONCE, "ranges")


class Upload:
    """A file that the back end's own writer uploads part by part."""

    def __init__(self, path: RemotePath):
        self._path = path
        fs = file_system(path.scheme, os.getpid(), TRIES)
        self._file = self._told(lambda: fs.open(str(path), "wb", block_size=PART))
        self._bytes = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.abort()

    def write(self, data: bytes | memoryview) -> int:
        content = memoryview(data).cast("B")
        self._bytes += len(content)
        for begin in range(0, len(content), PART):
            part = content[begin : begin + PART]
            self._told(lambda part=part: self._file.write(part))  # type: ignore[misc]
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self._file.closed:
            self._told(self._file.close)
            check_size(self._path, self._bytes)

    def abort(self) -> None:
        with suppress(Exception):
            self._file.discard()
        self._file.closed = True

    def _told(self, call: Callable[[], Any]) -> Any:
        return again(call, str(self._path), patience=0)  # the writer has tried again already


def check_size(path: RemotePath, size: int) -> None:
    """Raise StorageError if the file at ``path`` has not ``size`` bytes."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size:
            return
    raise StorageError(f"{path} is not there in its {size:,} bytes, though the store has taken them")


def end_uploads(folder: RemotePath) -> int:
    """End the uploads of files under ``folder`` that a killed process has left; how many there were. Of S3:
    other stores forget them by themselves."""
    fs = folder.file_system
    if not hasattr(fs, "call_s3"):
        return 0
    bucket, prefix, _ = fs.split_path(f"{folder}/step-")
    try:
        found = again(
            lambda: run_call(fs, "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix),
            str(folder),
        )
    except StorageError:  # what is not allowed everywhere, and costs only storage
        return 0
    uploads = found.get("Uploads") or []
    for upload in uploads:
        name = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with suppress(Exception):
            run_call(fs, "call_s3", "abort_multipart_upload", **name)
    return len(uploads)
