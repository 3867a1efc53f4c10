"""Paths of this machine: what can be none is refused by name, and only regular files are read.

Nothing here reads or writes object storage: taken as a path, ``s3://bucket/run`` would become a folder
``s3:``. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path

_URL = re.compile(r"(?:^|,)\s*([A-Za-z][A-Za-z0-9+.-]*)://([^,\s]*)")  # of several paths with commas, too
_HUB = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)(datasets/)?([\w.-]+/([\w.-]+))")
_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder in place of ``~``, or as it is where there is no such user (of which
    ``Path.expanduser`` makes an error)."""
    return Path(os.path.expanduser(path))


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to be read, if it is a regular one: a FIFO waits for its writer, a device may have no end.

    Raises:
        OSError: it cannot be opened, it is something else, or no file can have this name.
    """
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


def path_problem(text: str) -> tuple[str, str] | None:
    """Say why ``text`` names nothing on this machine, and what to do; None where it may."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        name = b"\0"
    longest = max(map(len, re.split(rb"[,/]", name)))
    if b"\0" in name or longest > _NAME_BYTES or (len(name) > _PATH_BYTES and b"," not in name):
        return "no file can have this name: it is too long, or has a NUL or half a surrogate", "correct it"
    return url_problem(text)


def url_problem(text: str) -> tuple[str, str] | None:
    """Say why a URL names nothing on this machine, and what to do; None where ``text`` is none."""
    found = _URL.search(text)
    if found is None:
        return None
    scheme, place = found.groups()
    rule = f"{scheme}:// is a URL, and only files and folders of this machine are read and written"
    if scheme == "file":
        return rule, f"write the path alone: {place.removeprefix('localhost')}"
    if hub := _HUB.search(text):
        kind = "--repo-type dataset " if hub[1] else ""
        return rule, f"hf download {kind}{hub[2]} --local-dir ./{hub[3]} fetches it; then name ./{hub[3]}"
    return rule, "copy it to a local disk or mount it, and name that path"
