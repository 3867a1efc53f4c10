"""Find text files by name, folder or glob, and check them before a run starts."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from toolkit.config.local_paths import expand_user
from toolkit.data import text_files
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import READ, SUFFIXES, SourceError, kind, require
from toolkit.data.folder_files import choose_files
from toolkit.errors import ConfigError, Problem, closest

_LIKE_AN_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MAX_ENTRIES = 500_000  # maximum number of files and folders to search below a folder


def open_text(path: str, text_column: str = "text") -> Corpus:
    """Find the files at ``path`` for a tool, like :func:`~toolkit.data.sources.open_corpus`.

    A file that is named explicitly may have any suffix and is then read as text.

    Raises:
        SourceError: As in :func:`~toolkit.data.sources.open_corpus`, or a folder has several splits.
            ConfigError: ``text_column`` is not "text", but no file has columns.
    """
    match = find(path, split=None, any_suffix=True)
    source = Corpus(path, match.files, text_column, notes=match.notes)
    if text_column != "text" and all(kind(file) == "text" for file in source.files):
        raise ConfigError(Problem(f"no file of {path} has columns", "remove it", "text_column", text_column))
    check_columns(source)
    return source


class FileList(NamedTuple):
    """Files, the splits of their folders, and notes on skipped files."""

    files: tuple[Path, ...]
    splits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find(path: str, *, split: str | None, any_suffix: bool = False) -> FileList:
    """Find the files at ``path``.

    ``split`` selects one of several splits of a folder. With ``any_suffix``, explicitly named files may have
    any suffix.

    Raises:
        SourceError: There are no files, a file cannot be read, or a folder lacks the split.
    """
    if "://" in path:
        from toolkit.data.remote_text import find_remote

        return FileList(*find_remote(path, split))
    # An existing path is not split, so that names may contain commas and brackets.
    items = [path] if os.path.exists(os.path.expanduser(path)) else [item.strip() for item in path.split(",")]
    by_real_path: dict[str, Path] = {}
    splits: list[str] = []
    notes: list[str] = []
    for item in filter(None, items):
        some = _find_item(item, split, any_suffix=any_suffix)
        splits += some.splits
        notes += some.notes
        for file in some.files:
            by_real_path.setdefault(os.path.realpath(file), file)  # several links may lead to it
    files = tuple(by_real_path.values())
    for file in files:
        if os.path.exists(file) and not os.path.isfile(file):
            raise _path_error(path, f"{file} is not a regular file", "use text files")
        if not os.access(file, os.R_OK):
            raise _path_error(path, f"{file} cannot be read", "give this user permission to read it")
    if not files:
        raise _path_error(path, "it contains no file name", "set a file, a folder or a glob")
    return FileList(files, tuple(dict.fromkeys(splits)), tuple(notes))


def _find_item(item: str, split: str | None, *, any_suffix: bool) -> FileList:
    path = expand_user(item)
    if _is_saved_dataset(path):
        from toolkit.data import hub

        return FileList(*hub.saved_files(path.absolute(), split))
    if path.is_dir():
        chosen = choose_files(item, (file.relative_to(path).as_posix() for file in _walk(path)), split)
        files = tuple(Path(os.path.abspath(path / name)) for name in chosen.names)
        return FileList(files, chosen.splits, (chosen.note,) * bool(chosen.note))
    if os.path.exists(path):
        matches = [path]
    elif glob.has_magic(item):
        names = _matches(str(path), item)
        matches = sorted(Path(name) for name in names if not os.path.isdir(name))
        if not matches:
            raise _path_error(item, "no file matches this pattern", "check the pattern")
    else:
        hint = _path_hint(path)
        if not any_suffix and _LIKE_AN_ID.fullmatch(item) and not path.parent.exists():
            hint += f"; if it is a dataset of the Hugging Face Hub, set dataset = {item!r}, not dataset_path"
        raise _path_error(item, "there is no such file or folder", hint)
    for file in matches:
        if not any_suffix and not file.name.endswith(SUFFIXES):
            raise _path_error(item, f"{file.name!r} is not a supported text file", f"use a {READ} file")
    return FileList(tuple(Path(os.path.abspath(file)) for file in matches))


def _is_saved_dataset(path: Path) -> bool:
    """Return whether this folder was written by ``save_to_disk``."""
    single = all(os.path.isfile(path / name) for name in ("state.json", "dataset_info.json"))
    return single or os.path.isfile(path / "dataset_dict.json")


def _walk(top: Path) -> Iterator[Path]:
    for here, names in _folders(top, str(top)):
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _folders(top: str | Path, item: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and its subfolders with their file names, each once even if several links point to it.

    Raises:
        SourceError: There are so many that ``item`` is probably a mistake, or a folder cannot be read.
    """

    def raise_error(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # ignore folders removed during the search
            rule = f"the folder {error.filename} cannot be read: {error.strerror}"
            raise _path_error(item, rule, "make it readable, or use a more specific path")

    seen, entries = set(), 0
    for here, folders, names in os.walk(top, followlinks=True, onerror=raise_error):
        try:
            status = os.stat(here)
        except OSError:  # removed during the search
            continue
        entries += 1 + len(names)
        if entries > MAX_ENTRIES:
            rule = f"there are more than {MAX_ENTRIES:,} files and folders below {top}"
            raise _path_error(item, rule, "use the folder that contains the text")
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield here, names


def _matches(pattern: str, item: str) -> Iterator[str]:
    """Yield the paths that match a glob, without Python's repeated descent into link cycles."""
    head, recursive, tail = re.sub(r"(^|/)\*\*$", r"\1**/*", pattern).partition("**/")
    if not recursive or (head and not head.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(head) if head else ["."]:
        for here, _ in _folders(top, item):
            yield from _matches(os.path.join(glob.escape(here), tail), item)


def _path_hint(path: Path) -> str:
    parent = path.absolute()
    while not parent.is_dir():
        parent = parent.parent
    siblings = os.listdir(parent) if parent == path.absolute().parent else []
    close = closest(path.name, siblings)
    return f"did you mean {path.with_name(close)}?" if close else f"the path exists up to {parent}"


def _path_error(path: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", path))


def check_columns(source: Corpus) -> None:
    """Check the first file of each kind for missing columns before a run starts."""
    first, shape = {kind(path): path for path in reversed(source.files)}, source.shape
    if zst := next((path.name for path in source.files if path.suffix == ".zst"), None):
        require("pyarrow", f"reading {zst}", "dataset_path", source.name)
    if shape and "text" in first:
        rule = f"{first['text'].name} is plain text, but format {shape.format} needs columns"
        fix = 'use .jsonl or .parquet files, or set the format to "text"'
        raise SourceError(Problem(rule, fix, "dataset_path", source.name))
    if "json" in first:
        _check_first_row(first["json"], source)
    if "rows" in first:
        require("pyarrow", f"reading {first['rows'].name}", "dataset_path", source.name)
        from toolkit.data import parquet  # the import takes tenths of a second

        if shape:
            parquet.check_shape(first["rows"], shape)
        else:
            parquet.check_schema(first["rows"], source.text_column)


def _check_first_row(path: Path, source: Corpus) -> None:
    first = text_files.first_row(path)
    if first is None:
        return
    if not source.shape:
        first.texts(source.text_column)
        return
    for number, row in first.rows():
        source.shape.check(row, f"{path}, {first.unit} {number}")
