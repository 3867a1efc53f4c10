"""Paths of the local file system: only regular files are read, and invalid paths and URLs are reported.

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

EMBEDDED_TOKENIZER = "embedded"
"""The value of model.hf_assets_path for the included tokenizer."""
_TOKENIZER_FOLDER = Path(__file__).parents[1] / "data/embedded/tokenizer"
_TORCHTITANS_TOKENIZER = "./tests/assets/tokenizer"
_NAME_BYTES, _PATH_BYTES = 255, 4095  # limits of Linux


def expand_user(path: str | os.PathLike[str], *, inside: Path | None = None) -> Path:
    """Return a path with ``~`` expanded, inside the folder ``inside`` if it is relative.

    A URL gives a RemotePath (``toolkit/storage``), which has Path's interface for object storage.
    """
    if isinstance(path, str) and "://" not in path or isinstance(path, os.PathLike):
        return Path(inside or "", os.path.expanduser(path))
    from toolkit.storage.remote_path import RemotePath

    return path if isinstance(path, RemotePath) else RemotePath(path)  # type: ignore[return-value]


def assets_folder(path: str) -> Path:
    """Return the folder of ``model.hf_assets_path``. It is the folder of the included tokenizer for
    :data:`EMBEDDED_TOKENIZER`, and for torchtitan's default path if that does not exist."""
    if path == EMBEDDED_TOKENIZER or (path == _TORCHTITANS_TOKENIZER and not os.path.exists(path)):
        return _TOKENIZER_FOLDER
    return expand_user(path)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; a FIFO would wait for its writer, and a device may have no end.

    Raises:
        OSError: It cannot be opened, is not a regular file, or no file can have this name.
    """
    if not isinstance(path, str | os.PathLike):
        return path.open_regular()
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a NUL character, or an unpaired surrogate
        raise OSError(errno.EINVAL, "no file can have this name") from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return open(path, "rb")


def read_bytes(path: str | os.PathLike[str], *, at_most: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: As in :func:`open_regular`, or it has more than ``at_most`` bytes.
    """
    with open_regular(path) as file:
        content = file.read(at_most + 1)
    if len(content) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes")
    return content


def read_text(path: str | os.PathLike[str], *, at_most: int) -> str:
    """Return the text of a regular UTF-8 file.

    Raises:
        OSError: As in :func:`read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, at_most=at_most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is not UTF-8 text (byte {error.start})") from None


def path_problem(text: str, *, storage: bool | Literal["read"] = False) -> tuple[str, str] | None:
    """Return why ``text`` is not a valid local path (or, with ``storage``, URL of object storage), and the
    fix."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        name = b"\0"
    longest = max(map(len, re.split(rb"[,/]", name)))
    if b"\0" in name or longest > _NAME_BYTES or (len(name) > _PATH_BYTES and b"," not in name):
        return (
            "no file can have this name: it is too long, or has a NUL or an unpaired surrogate",
            "correct it",
        )
    if "://" not in text:
        return None
    from toolkit.storage.urls import url_problem

    return url_problem(text, storage=storage)
