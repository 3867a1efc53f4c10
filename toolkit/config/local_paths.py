"""Paths: what can be none is refused by name, only regular files are read, no URL becomes a folder ``s3:``.

Imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Literal

_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux


def expand_user(path: str | os.PathLike[str], *, inside: Path | None = None) -> Path:
    """Return a path, ``inside`` that folder if it is relative, with the home folder in place of ``~`` where
    there is such a user; of a URL a RemotePath (``toolkit/storage``), which stands for a path of storage."""
    if isinstance(path, str) and "://" not in path or isinstance(path, os.PathLike):
        return Path(inside or "", os.path.expanduser(path))
    from toolkit.storage.remote_path import RemotePath

    return path if isinstance(path, RemotePath) else RemotePath(path)  # type: ignore[return-value]


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to be read, if it is a regular one: a FIFO waits for its writer, a device may have no end.

    Raises:
        OSError: it cannot be opened, it is something else, or no file can have this name.
    """
    if not isinstance(path, str | os.PathLike):
        return path.open_regular()
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return open(path, "rb")


def read_bytes(path: str | os.PathLike[str], *, at_most: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as :func:`open_regular`, or it has more bytes than ``at_most``.
    """
    with open_regular(path) as file:
        content = file.read(at_most + 1)
    if len(content) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes")
    return content


def read_text(path: str | os.PathLike[str], *, at_most: int) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        OSError: as :func:`read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, at_most=at_most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is not UTF-8 text (byte {error.start})") from None


def path_problem(text: str, *, storage: bool | Literal["read"] = False) -> tuple[str, str] | None:
    """Say why ``text`` names nothing here, nor with ``storage`` in object storage, and what to do."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        name = b"\0"
    longest = max(map(len, re.split(rb"[,/]", name)))
    if b"\0" in name or longest > _NAME_BYTES or (len(name) > _PATH_BYTES and b"," not in name):
        return "no file can have this name: it is too long, or has a NUL or half a surrogate", "correct it"
    if "://" not in text:
        return None
    from toolkit.storage.urls import url_problem

    return url_problem(text, storage=storage)
