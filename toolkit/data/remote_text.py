"""Text files in object storage, on the Hub or on a web server, found by URL and read by byte ranges.

Retries, timeouts and messages come from :mod:`toolkit.storage.remote_path`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from toolkit.data.file_kinds import READ, SUFFIXES, SourceError
from toolkit.data.folder_files import choose_files
from toolkit.errors import Problem
from toolkit.storage.remote_path import RemotePath

_MAGIC = "*?["


class RemoteText(RemotePath):
    """A read-only file in any fsspec file system; ``size`` is in bytes."""

    reads = True
    size: int | None = None

    def stat(self) -> Any:
        """Return only ``st_size`` and ``st_mode``; they are requested once."""
        if self.size is None:
            status = super().stat()
            self.size, self._mode = status.st_size, status.st_mode
        return SimpleNamespace(st_size=self.size, st_mode=self._mode)

    _mode = 0o100644

    def files(self) -> Iterator[RemoteText]:
        """List the files with this prefix, in one request."""
        entries = self._call("find", str(self), detail=True)
        for name in sorted(entries):
            path = RemoteText(name if "://" in name else f"{self.scheme}://{name}")
            path.size = entries[name]["size"]
            yield path


def find_remote(urls: str, split: str | None) -> tuple[tuple[Path, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the files at ``urls``, and the splits and notes of their folders; ``split`` selects a split.

    A URL is a file, a folder (searched recursively) or a pattern; several are separated by commas. The
    returned files can be used wherever text is read from paths.

    Raises:
        SourceError: There are no files, one has an unsupported suffix, or a folder lacks the split.
        StorageError: The store cannot be reached, or denies access.
    """
    by_url: dict[str, RemoteText] = {}
    splits: list[str] = []
    notes: list[str] = []
    for url in filter(None, (item.strip() for item in urls.split(","))):
        if "://" not in url:
            raise _error(urls, f"{url} is a path among URLs", "use either paths or URLs")
        files, of_folder, note = _find(url, split)
        splits += of_folder
        notes += [note] * bool(note)
        for file in files:
            by_url.setdefault(str(file), file)
    return cast(tuple[Path, ...], tuple(by_url.values())), tuple(dict.fromkeys(splits)), tuple(notes)


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
            raise _error(url, f"{other!r} is not a supported text file", f"use a {READ} file")
        return files, (), ""
    if url.endswith(SUFFIXES):
        file = RemoteText(url)
        if not file.exists():
            raise _error(url, "there is no such file", "correct it")
        return [file], (), ""
    top = RemoteText(url)
    files_by_name = {str(file).removeprefix(f"{top}/"): file for file in top.files()}
    visible = (name for name in files_by_name if not re.search(r"(^|/)\.", name))
    chosen = choose_files(url, visible, split)
    return [files_by_name[name] for name in chosen.names], chosen.splits, chosen.note


def _error(url: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", url))
