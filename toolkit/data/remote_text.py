"""Files of text in object storage, on the hub or behind a web address, found by URL and read by ranges.

Retries, time-outs and messages are those of :mod:`toolkit.storage.remote_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from toolkit.data.file_kinds import READ, SUFFIXES, SourceError
from toolkit.data.folder_files import take
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


def find_remote(urls: str, split: str | None) -> tuple[tuple[Path, ...], tuple[str, ...], tuple[str, ...]]:
    """The files at ``urls``: a file, a folder with its subfolders, a pattern, or several with commas between,
    with the splits and the notes of folders, of which ``split`` is taken. They stand for paths wherever text
    is read.

    Raises:
        SourceError: there is none, or one of another suffix; a folder without this split.
        StorageError: the store cannot be reached, or refuses.
    """
    found: dict[str, RemoteText] = {}
    splits: list[str] = []
    notes: list[str] = []
    for url in filter(None, (item.strip() for item in urls.split(","))):
        if "://" not in url:
            raise _error(urls, f"{url} is a path beside URLs", "name either")
        files, of_folder, note = _find(url, split)
        splits += of_folder
        notes += [note] * bool(note)
        for file in files:
            found.setdefault(str(file), file)
    return cast(tuple[Path, ...], tuple(found.values())), tuple(dict.fromkeys(splits)), tuple(notes)


def _find(url: str, split: str | None) -> tuple[list[RemoteText], tuple[str, ...], str]:
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
        if other := next((file.name for file in files if not file.name.endswith(SUFFIXES)), None):
            raise _error(url, f"{other!r} is not a text corpus", f"name a {READ} file")
        return files, (), ""
    if url.endswith(SUFFIXES):
        file = RemoteText(url)
        if not file.exists():
            raise _error(url, "there is no such file", "correct it")
        return [file], (), ""
    top = RemoteText(url)
    found = {str(file).removeprefix(f"{top}/"): file for file in top.files()}
    taken = take(url, (name for name in found if not re.search(r"(^|/)\.", name)), split)
    return [found[name] for name in taken.names], taken.splits, taken.note


def _error(url: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", url))
