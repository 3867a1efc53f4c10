"""Files of text in object storage, on the hub or behind a web address, found by URL and read by ranges.

Retries, time-outs and messages are those of :mod:`toolkit.storage.remote_path`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from toolkit.data.corpus import SourceError
from toolkit.errors import Problem
from toolkit.storage.remote_path import RemotePath

_MAGIC = "*?["


class RemoteText(RemotePath):
    """A file that is read and never written, of any file system of fsspec, with its ``size`` in bytes."""

    reads = True
    size: int | None = None

    def stat(self) -> Any:
        """``st_size`` and ``st_mode`` alone, which are asked for once."""
        if self.size is None:
            found = super().stat()
            self.size, self._mode = found.st_size, found.st_mode
        return SimpleNamespace(st_size=self.size, st_mode=self._mode)

    _mode = 0o100644

    def files(self) -> Iterator[RemoteText]:
        """The files under this name, by one request."""
        found = self._call("find", str(self), detail=True)
        for name in sorted(found):
            path = RemoteText(name if "://" in name else f"{self.scheme}://{name}")
            path.size = found[name]["size"]
            yield path


def find_remote(urls: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """The files at ``urls``: a file, a folder with its subfolders, a pattern, or several with commas between.
    They stand for paths wherever text is read.

    Raises:
        SourceError: there is none, or one of another suffix.
        StorageError: the store cannot be reached, or refuses.
    """
    found: dict[str, RemoteText] = {}
    for url in filter(None, (item.strip() for item in urls.split(","))):
        if "://" not in url:
            raise _error(urls, f"{url} is a path beside URLs", "name either")
        for file in _find(url, suffixes):
            found.setdefault(str(file), file)
    return cast(tuple[Path, ...], tuple(found.values()))


def _find(url: str, suffixes: tuple[str, ...]) -> list[RemoteText]:
    names = url.split("/")
    magic = next((at for at, name in enumerate(names) if any(mark in name for mark in _MAGIC)), None)
    if magic is not None:
        depth, pattern = len(names), names[magic:]
        files = [
            file
            for file in RemoteText("/".join(names[:magic])).files()
            if len(parts := str(file).split("/")) == depth and all(map(fnmatchcase, parts[magic:], pattern))
        ]
        if not files:
            raise _error(url, "no file matches this pattern", "check the pattern")
        if other := next((file.name for file in files if not file.name.endswith(suffixes)), None):
            raise _error(url, f"{other!r} is not a text corpus", f"use one of {', '.join(suffixes)}")
        return files
    if url.endswith(suffixes):
        file = RemoteText(url)
        if not file.exists():
            raise _error(url, "there is no such file", "correct it")
        return [file]
    files = [file for file in RemoteText(url).files() if file.name.endswith(suffixes)]
    if not files:
        raise _error(url, f"it holds no {', '.join(suffixes)} file", "check it")
    return files


def _error(url: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", url))
