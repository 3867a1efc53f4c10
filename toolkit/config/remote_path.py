"""Files in object storage, by the names and methods of ``pathlib`` that weights and checkpoints need.

A :class:`RemotePath` is no ``os.PathLike``: what knows files of this machine alone refuses it, and no folder
``s3:`` comes to be. Any fsspec file system serves that lists, reads ranges and writes; S3 is spoken to by its
own calls, so that an upload goes on at the part that failed and is checked by its MD5.

A call that fails by a lost connection, a timeout or an answer that says "later" is tried again, after longer
and longer pauses, for ``PATIENCE`` seconds; a store that has not yet answered once gets ``FIRST_PATIENCE``.
Credentials come from where the back end looks for them (environment, profile, role), and no message has them.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import stat
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import md5
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from toolkit.config.urls import url_problem
from toolkit.errors import DataError, redacted

if TYPE_CHECKING:
    from typing_extensions import Buffer

PATIENCE, FIRST_PATIENCE = 300.0, 30.0
"""Seconds for which a call is tried again."""
TIMEOUT = 60.0
"""Seconds that one try may take; it moves at most ``PART`` bytes."""
PART = 64 << 20
"""Bytes of a part of an upload, of which S3 takes 10,000."""
PARTS_AT_ONCE = 3
RANGE, RANGES_AT_ONCE = 16 << 20, 8
"""Bytes of a request of a large read, and how many such requests run at once."""
_FIRST_BLOCK, _LAST_BLOCK = 64 << 10, 64 << 20
"""Bytes that a file which is read from anywhere asks for at once, and one that is read through."""

_AGAIN = re.compile(
    "(ClientConnection|ClientPayload|Connection|EndpointConnection|FSTimeout|HTTPClient|IncompleteRead|"
    "ResponseParser|ResponseStreaming|ServerTimeout|ServiceRequest|ServiceResponse|Timeout)Error|IncompleteRead"
)
"""Names of the classes of errors, of any back end, after which the same call may go through."""
_AGAIN_CODES = ("RequestTimeout", "SlowDown", "BadDigest", "IncompleteBody", "InternalError", "Throttling")
_REFUSED = {
    "NoSuchBucket": ("the bucket does not exist", "create it, or correct its name"),
    "RequestTimeTooSkewed": ("the clock of this machine is wrong", "set it (timedatectl, chrony)"),
    "ExpiredToken": ("the credentials have expired", "renew them"),
    "AccessDenied": (
        "these credentials may not do that",
        "have them allowed to list, read, write and delete there",
    ),
}
_QUOTA = re.compile(r"quota|storage.?full|insufficient.?storage|no space", re.IGNORECASE)
_LOGIN = (
    "the credentials are missing or wrong",
    "set them for the store (of S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
)
_answered = False


class StorageError(DataError):
    """Object storage that cannot be reached or does not let us; never a file that is not there."""


class RemotePath:
    """``scheme://bucket/name``. A folder is there while a file is in it; making one does nothing.

    Raises:
        StorageError: by every method that asks the store.
    """

    def __init__(self, url: str):
        if problem := url_problem(url, storage=True):
            raise StorageError(f"{redacted(url)}: {problem[0]}\n  fix:  {problem[1]}")
        self._scheme, _, rest = url.partition("://")
        self._names = tuple(name for name in rest.split("/") if name)

    def _of(self, *names: str) -> RemotePath:
        return RemotePath(f"{self._scheme}://{'/'.join(names)}")

    def __str__(self) -> str:
        return f"{self._scheme}://{'/'.join(self._names)}"

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
        """``st_size`` and ``st_mode`` alone.

        Raises:
            FileNotFoundError: nothing has this name.
        """
        found = self._call("info", str(self))
        kind = stat.S_IFDIR if found["type"] == "directory" else stat.S_IFREG
        return SimpleNamespace(st_size=found["size"], st_mode=kind | 0o644)

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
        names = {path.rstrip("/").rpartition("/")[2] for path in found} - {self._names[-1], ""}
        yield from (self / name for name in sorted(names))

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
        fs = _file_system(self._scheme, os.getpid())
        return _S3Upload(self) if hasattr(fs, "call_s3") else _Upload(self, fs)

    def read_into(self, memory: memoryview, offset: int) -> int:
        """Fill ``memory`` with the bytes from ``offset`` on, by a few requests at once; how many."""

        def one(begin: int) -> int:
            part = memory[begin : begin + RANGE]
            content = self._call("cat_file", str(self), start=offset + begin, end=offset + begin + len(part))
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
        fs = _file_system(self._scheme, os.getpid())
        exclusive = {"mode": "create"} if hasattr(fs, "call_s3") or self._scheme in ("gs", "gcs") else {}
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
        fs = _file_system(self._scheme, os.getpid())
        return again(lambda: _run(fs, method, *args, **options), str(self))


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


class _Upload:
    """A file that the back end's own writer uploads part by part."""

    def __init__(self, path: RemotePath, fs: Any):
        self._path = path
        self._file = self._told(lambda: fs.open(str(path), "wb", block_size=PART))
        self._bytes = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.abort()

    def write(self, data: bytes | memoryview) -> int:
        self._bytes += len(data)
        self._told(lambda: self._file.write(data))
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


class _S3Upload:
    """A file that goes up in parts, of which a few are on their way while the next is filled: at most
    ``PARTS_AT_ONCE + 2`` of them are in memory. What fits in one part is one request."""

    def __init__(self, path: RemotePath):
        self._path = path
        self._fs = _file_system(path._scheme, os.getpid())
        self._bucket, self._key, _ = self._fs.split_path(str(path))
        self._buffer = bytearray()
        self._bytes = 0
        self._upload = ""
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, "upload")
        self._parts: list[Future[str]] = []
        self._open = True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close() if kind is None else self.abort()

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        self._bytes += len(rest)
        while len(self._buffer) + len(rest) > PART:
            room = PART - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            self._send()
        self._buffer += rest
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """Have the file be there, in the size that was written."""
        if not self._open:
            return
        try:
            if not self._upload:
                self._checked("put_object", bytes(self._buffer))
            else:
                self._send()
                self._complete()
            check_size(self._path, self._bytes)
        except BaseException:
            self.abort()
            raise
        self._end()

    def abort(self) -> None:
        """Leave nothing of it."""
        for part in self._parts:
            part.cancel()
        self._end()
        if self._upload:
            with suppress(Exception):  # the next start of a run finds it
                _run(self._fs, "call_s3", "abort_multipart_upload", **self._named(), UploadId=self._upload)

    def _end(self) -> None:
        self._open, self._buffer = False, bytearray()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _named(self) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key}

    def _send(self) -> None:
        if not self._upload:
            self._upload = self._call("create_multipart_upload")["UploadId"]
        if len(self._parts) > PARTS_AT_ONCE:
            self._parts[-PARTS_AT_ONCE - 1].result()
        body, number, self._buffer = bytes(self._buffer), len(self._parts) + 1, bytearray()
        self._parts.append(
            self._pool.submit(self._checked, "upload_part", body, PartNumber=number, UploadId=self._upload)
        )

    def _complete(self) -> None:
        parts = [{"PartNumber": n, "ETag": part.result()} for n, part in enumerate(self._parts, 1)]
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            check_size(self._path, self._bytes)  # it is complete already: the answer to a try was lost

    def _checked(self, method: str, body: bytes, **options: Any) -> str:
        """Send bytes that the store compares with their MD5, and compare the MD5 that it answers with."""
        digest = md5(body, usedforsecurity=False)
        content = b64encode(digest.digest()).decode()

        def send() -> str:
            answer = _run(
                self._fs, "call_s3", method, **self._named(), Body=body, ContentMD5=content, **options
            )
            tag: str = answer.get("ETag", "")
            plain = not answer.get("SSECustomerAlgorithm") and "kms" not in answer.get(
                "ServerSideEncryption", ""
            )
            if plain and re.fullmatch('"?[0-9a-f]{32}"?', tag) and tag.strip('"') != digest.hexdigest():
                raise TimeoutError("the store has other bytes than were sent")  # to be sent again
            return tag

        return again(send, str(self._path))

    def _call(self, method: str, **options: Any) -> Any:
        call = {**self._named(), **options}
        return again(lambda: _run(self._fs, "call_s3", method, **call), str(self._path))


def check_size(path: RemotePath, size: int) -> None:
    """Raise StorageError if the file at ``path`` has not ``size`` bytes."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size:
            return
    raise StorageError(f"{path} is not there in its {size:,} bytes, though the store has taken them")


def end_uploads(folder: RemotePath) -> int:
    """End the uploads of files under ``folder`` that a killed process has left; how many there were. Of S3:
    other stores forget them by themselves."""
    fs = _file_system(folder._scheme, os.getpid())
    if not hasattr(fs, "call_s3"):
        return 0
    bucket, key, _ = fs.split_path(str(folder))
    try:
        found = again(
            lambda: _run(fs, "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/step-"),
            str(folder),
        )
    except StorageError:  # what is not allowed everywhere, and costs only storage
        return 0
    uploads = found.get("Uploads") or []
    for upload in uploads:
        name = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with suppress(Exception):
            _run(fs, "call_s3", "abort_multipart_upload", **name)
    return len(uploads)


def again(call: Callable[[], Any], place: str, *, patience: float | None = None) -> Any:
    """What ``call`` returns, tried again as the module says.

    Raises:
        FileNotFoundError, FileExistsError: a file is not there, or is.
        StorageError: all else, in the user's words.
    """
    global _answered
    begun, pause = time.monotonic(), 0.2
    while True:
        try:
            result = call()
        except FileExistsError:
            raise
        except Exception as error:
            code = _code(error)
            if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                _answered = True
                raise FileNotFoundError(errno.ENOENT, "there is no such file", place) from None
            limit = (PATIENCE if _answered else FIRST_PATIENCE) if patience is None else patience
            passed = time.monotonic() - begun
            if not _may_pass(error, code):
                raise _error(error, code, place) from None
            if passed + pause > limit:
                raise _error(error, code, place, passed) from None
            time.sleep(pause * random.uniform(0.5, 1))  # ranks do not come back all at once
            pause = min(2 * pause, 10)
        else:
            _answered = True
            return result


def _run(fs: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of a file system; of an asynchronous one for at most ``TIMEOUT`` seconds."""
    if not fs.async_impl:
        return getattr(fs, method)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=TIMEOUT, **options)


@lru_cache
def _file_system(scheme: str, process: int) -> Any:
    """The file system of a scheme in this process."""
    try:
        import fsspec

        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{scheme}:// needs a file system that is not here ({error})\n"
            "  fix:  pip install -c constraints.txt '.[remote]', or what fsspec names for it"
        ) from None
    options: dict[str, Any] = {}
    if hasattr(kind, "call_s3"):  # the tries are counted here
        timeouts = {"connect_timeout": 10, "read_timeout": TIMEOUT / 2, "max_pool_connections": 32}
        options = {"config_kwargs": {**timeouts, "retries": {"max_attempts": 0}}}
    fs = kind(use_listings_cache=False, skip_instance_cache=True, **options)
    if options:
        fs.retries = 1
    return fs


@lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RANGES_AT_ONCE, "ranges")


def _response(error: BaseException) -> dict[str, Any]:
    """The answer of S3 that made an error, which s3fs has put into words."""
    for one in (error, error.__cause__):
        found = getattr(one, "response", None)
        if isinstance(found, dict):
            return found
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _status(error: BaseException) -> int:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    for name in ("status_code", "status", "code"):
        status = status or getattr(error, name, None)
    return status if isinstance(status, int) else 0


def _may_pass(error: BaseException, code: str) -> bool:
    """Say if the same call may go through later."""
    if _QUOTA.search(code) or _status(error) == 507:
        return False
    chain = [error, *([error.__cause__] if error.__cause__ else [])]
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    return (
        any(map(_AGAIN.fullmatch, names))
        or code in _AGAIN_CODES
        or _status(error) in (408, 429, *range(500, 600))
    )


def _error(error: BaseException, code: str, place: str, seconds: float | None = None) -> StorageError:
    """The error in the user's words, without anything that a back end may have told of credentials."""
    name = type(error).__name__
    if code in _REFUSED:
        rule, fix = _REFUSED[code]
    elif _QUOTA.search(code) or _status(error) == 507 or _QUOTA.search(str(error)):
        rule, fix = "the quota of the store is used up", "delete what is not needed, or have it raised"
    elif "Credentials" in name or code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        rule, fix = _LOGIN
    elif isinstance(error, PermissionError) or _status(error) in (401, 403):
        said = f" ({code})" if code and not code.isdigit() else ""
        rule, fix = f"the store refuses these credentials{said}", _LOGIN[1] + ", and have them allowed it"
    elif seconds is not None:
        rule = f"it did not answer for {seconds:.0f} s ({code or name}: {_plain(error)})"
        fix = "see if the store is up, and if its address is right (of S3 AWS_ENDPOINT_URL)"
    else:
        rule, fix = f"{code or name}: {_plain(error)}", "correct it, or name another place"
    return StorageError(f"{place} cannot be used: {rule}\n  fix:  {fix}")


def _plain(error: BaseException) -> str:
    """What an error says in one line, without credentials."""
    text = redacted(" ".join(str(error).split()))[:300]
    for key, value in os.environ.items():
        if value and len(value) > 3 and re.search("KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING", key):
            text = text.replace(value, "***")
    return text or type(error).__name__
