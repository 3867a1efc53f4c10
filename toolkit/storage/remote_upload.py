"""Files that go up to object storage while they are written, with a bounded part of them in memory.

S3 is spoken to by its own calls, so that an upload goes on at the part that failed and each part is compared
by its MD5. Of other stores their own writers do what they can.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import md5
from typing import Any

from toolkit.storage.remote_calls import StorageError, again, run_call
from toolkit.storage.remote_path import RemotePath

PART = 64 << 20
"""Bytes of a part of an upload, of which S3 takes 10,000."""
PARTS_AT_ONCE = 3


class Upload:
    """A file that the back end's own writer uploads part by part."""

    def __init__(self, path: RemotePath):
        self._path = path
        self._file = self._told(lambda: path.file_system.open(str(path), "wb", block_size=PART))
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


class S3Upload:
    """A file that goes up in parts, of which a few are on their way while the next is filled: at most
    ``PARTS_AT_ONCE + 2`` of them are in memory. What fits in one part is one request."""

    def __init__(self, path: RemotePath):
        self._path = path
        self._fs = path.file_system
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
            call = {**self._named(), "UploadId": self._upload}
            with suppress(Exception):  # the next start of a run finds it
                run_call(self._fs, "call_s3", "abort_multipart_upload", **call)

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
            answer = run_call(
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
        return again(lambda: run_call(self._fs, "call_s3", method, **call), str(self._path))


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
