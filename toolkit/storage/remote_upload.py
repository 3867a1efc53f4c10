"""Files that are uploaded to object storage while they are written, by the back end's own writer.

The writer sends a part at a time, and tries a part again by itself (:data:`TRIES`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toolkit.storage.remote_calls import StorageError, again, file_system, run_call
from toolkit.storage.remote_path import RemotePath

PART = 64 << 20
"""Bytes of a part of an upload, of which S3 takes 10,000."""
TRIES = 32
"""Tries of a part: with S3's pauses of up to 20 s, about 5 minutes."""


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
