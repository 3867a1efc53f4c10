"""Files in object storage, with the ``pathlib`` methods that weights and checkpoints need.

A :class:`RemotePath` is not an ``os.PathLike``, so that code for local files rejects it instead of creating a
folder ``s3:``. Any fsspec file system that can list, read ranges and write is supported.
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
from toolkit.storage.remote_calls import StorageError, file_system, retry, run_call
from toolkit.storage.urls import url_problem

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

RANGE, RANGES_AT_ONCE = 16 << 20, 8
"""Bytes per request of a large read, and maximum number of parallel requests."""
_FIRST_BLOCK, _LAST_BLOCK = 64 << 10, 64 << 20
"""Bytes per request of random and of sequential reads."""
PART = 64 << 20
"""Bytes per part of an upload; S3 allows 10,000 parts."""
TRIES = 28
"""Attempts per part: about 5 minutes with s3fs's pauses of up to 15 s."""


class RemotePath:
    """``scheme://bucket/name``. A folder exists as long as it contains files; mkdir has no effect.

    Raises:
        StorageError: in every method that accesses the store.
    """

    reads = False
    """True if read-only sources (the Hub, a web address) are accepted too."""

    def __init__(self, url: str):
        if problem := url_problem(url, storage="read" if self.reads else True):
            raise StorageError(f"{redact(url)}: {problem[0]}\n  fix:  {problem[1]}")
        self.scheme, _, rest = url.partition("://")
        self._names = tuple(name for name in rest.split("/") if name)

    def _of(self, *names: str) -> Self:
        other = object.__new__(type(self))  # not validated, because a listing may contain any name
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

    # Status

    def stat(self) -> Any:
        """Return ``st_size``, ``st_mode``, and an ``st_mtime_ns`` that changes with the file.

        Raises:
                FileNotFoundError: nothing exists at this path.
        """
        info = self._call("info", str(self))
        kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        state = f"{info.get('ETag')} {info.get('LastModified')} {info.get('mtime')}"
        version = int.from_bytes(blake2b(state.encode(), digest_size=7).digest(), "big")
        return SimpleNamespace(st_size=info["size"], st_mode=kind | 0o644, st_mtime_ns=version)

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
        folder = self.file_system._strip_protocol(str(self)).strip("/")  # some stores list the folder itself
        paths = {path.strip("/") for path in found} - {folder, ""}
        yield from (self / name for name in sorted(path.rpartition("/")[2] for path in paths))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield paths that match ``pattern``, component by component."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else [path]

    # Reading

    def open_regular(self) -> io.BufferedReader:
        """Open the file for random reads, as in :func:`toolkit.config.local_paths.open_regular`."""
        return io.BufferedReader(_Reader(self, self.stat().st_size), _FIRST_BLOCK)

    def open(self, mode: str = "rb") -> Any:
        """Open the file for reading, or with ``"wb"`` for writing; a written file does not exist until it is
        closed."""
        if mode == "rb":
            return self.open_regular()
        assert mode == "wb", "only binary modes are supported"
        return Upload(self)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes starting at ``offset``, in parallel requests. Returns the number of
        bytes read."""

        def read_range(begin: int) -> int:
            target = memory[begin : begin + RANGE]
            content = self._call(
                "cat_file", str(self), start=offset + begin, end=offset + begin + len(target)
            )
            if len(content) > len(target):
                raise StorageError(f"{self}: the server ignores range requests and sends entire files")
            target[: len(content)] = content
            return len(content)

        begins = range(0, len(memory), RANGE)
        if len(begins) == 1:
            return read_range(0)
        return sum(_threads(os.getpid()).map(read_range, begins))

    # Writing

    def write_new(self, content: bytes) -> None:
        """Create a small file with one request.

        Raises:
                FileExistsError: the file exists with other contents.
        """
        exclusive = (
            {"mode": "create"} if hasattr(self.file_system, "call_s3") or self.scheme in ("gs", "gcs") else {}
        )
        try:
            self._call("pipe_file", str(self), content, **exclusive)
        except FileExistsError:
            if self.read_bytes() != content:  # equal if only the response to an earlier attempt was lost
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
        """Delete everything below this path, the files ``first`` before all others."""
        for name in first:
            (self / name).unlink()
        for path in self.iterdir():
            path.remove_tree()
            path.unlink()

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        fs = self.file_system
        return retry(lambda: run_call(fs, method, *args, **options), str(self))


class _Reader(io.RawIOBase):
    """Reads a file in blocks, caches the latest one, and increases the block size for sequential reads."""

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
        content = block[self._at - begin : self._at - begin + len(memory)]
        memory[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _block(self) -> tuple[int, memoryview]:
        """Return the offset and contents of the block at the current position."""
        begin, length = self._at // _FIRST_BLOCK * _FIRST_BLOCK, _FIRST_BLOCK
        for start, block in self._blocks:
            if start <= self._at < start + len(block):
                return start, block
            if start + len(block) == self._at:
                begin, length = self._at, min(4 * len(block), _LAST_BLOCK)
        memory = memoryview(bytearray(min(length, self._size - begin)))
        if self._path.read_into(memory, begin) != len(memory):
            raise StorageError(f"{self._path} was replaced while it was read")
        keep = 7 if length == _FIRST_BLOCK else 1
        self._blocks = [*self._blocks[-keep:], (begin, memory)]
        return begin, memory


@lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RANGES_AT_ONCE, "ranges")


class Upload:
    """A file open for writing, uploaded in parts by the backend's writer."""

    def __init__(self, path: RemotePath):
        self._path = path
        fs = file_system(path.scheme, os.getpid(), TRIES)
        self._file = self._call(lambda: fs.open(str(path), "wb", block_size=PART))
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
            self._call(lambda part=part: self._file.write(part))  # type: ignore[misc]
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self._file.closed:
            self._call(self._file.close)
            check_size(self._path, self._bytes)

    def abort(self) -> None:
        with suppress(Exception):
            self._file.discard()
        self._file.closed = True

    def _call(self, call: Callable[[], Any]) -> Any:
        return retry(call, str(self._path), patience=0)  # the writer itself retries


def check_size(path: RemotePath, size: int) -> None:
    """Raise StorageError unless the file at ``path`` has ``size`` bytes."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size:
            return
    raise StorageError(f"{path} does not have {size:,} bytes, although the store accepted them")


def abort_uploads(folder: RemotePath) -> int:
    """Abort the multipart uploads of killed processes below ``folder``. Returns their number. Only S3 needs
    this."""
    fs = folder.file_system
    if not hasattr(fs, "call_s3"):
        return 0
    bucket, prefix, _ = fs.split_path(f"{folder}/step-")
    try:
        response = retry(
            lambda: run_call(fs, "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix),
            str(folder),
        )
    except StorageError:  # some stores deny it, and leftovers only take up space
        return 0
    uploads = response.get("Uploads") or []
    for upload in uploads:
        name = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with suppress(Exception):
            run_call(fs, "call_s3", "abort_multipart_upload", **name)
    return len(uploads)
