"""Files of text: found by name, folder or glob, and looked at before anything is started."""

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
from toolkit.data.folder_files import take
from toolkit.errors import ConfigError, Problem, closest

_LIKE_AN_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MAX_ENTRIES = 500_000  # of a folder that is searched, folders included


def open_text(path: str, text_column: str = "text") -> Corpus:
    """The files at ``path`` that a program is to read, as :func:`~toolkit.data.sources.open_corpus` finds
    them; one that is named may have any suffix, and is text then.

    Raises:
        SourceError: as :func:`~toolkit.data.sources.open_corpus`; a folder has several splits.
        ConfigError: another column than "text" is named, and no file there has columns.
    """
    found = find(path, split=None, any_suffix=True)
    source = Corpus(path, found.files, text_column, notes=found.notes)
    if text_column != "text" and all(kind(file) == "text" for file in source.files):
        raise ConfigError(Problem(f"no file of {path} has columns", "remove it", "text_column", text_column))
    check_columns(source)
    return source


class Found(NamedTuple):
    """Files, the splits that their folders have, and notes on what is left out of these."""

    files: tuple[Path, ...]
    splits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find(path: str, *, split: str | None, any_suffix: bool = False) -> Found:
    """The files at ``path``; ``split`` counts where a folder has several, and a file that is named may have
    ``any_suffix``.

    Raises:
        SourceError: there are none, or one that cannot be read; a folder without this split.
    """
    if "://" in path:
        from toolkit.data.remote_text import find_remote

        return Found(*find_remote(path, split))
    # A path that exists is taken whole, so that a comma or a bracket in a name does no harm.
    items = [path] if os.path.exists(os.path.expanduser(path)) else [item.strip() for item in path.split(",")]
    found: dict[str, Path] = {}
    splits: list[str] = []
    notes: list[str] = []
    for item in filter(None, items):
        some = _find_item(item, split, any_suffix=any_suffix)
        splits += some.splits
        notes += some.notes
        for file in some.files:
            found.setdefault(os.path.realpath(file), file)  # whatever links name it
    files = tuple(found.values())
    for file in files:
        if os.path.exists(file) and not os.path.isfile(file):
            raise _path_error(path, f"{file} is no regular file", "name files of text")
        if not os.access(file, os.R_OK):
            raise _path_error(path, f"{file} cannot be read", "give this user permission to read it")
    if not files:
        raise _path_error(path, "it names no file", "name a file, a folder or a glob")
    return Found(files, tuple(dict.fromkeys(splits)), tuple(notes))


def _find_item(item: str, split: str | None, *, any_suffix: bool) -> Found:
    place = expand_user(item)
    if _is_saved_dataset(place):
        from toolkit.data import hub

        return Found(*hub.saved_files(place.absolute(), split))
    if place.is_dir():
        taken = take(item, (file.relative_to(place).as_posix() for file in _walk(place)), split)
        files = tuple(Path(os.path.abspath(place / name)) for name in taken.names)
        return Found(files, taken.splits, (taken.note,) * bool(taken.note))
    if os.path.exists(place):
        found = [place]
    elif glob.has_magic(item):
        matches = _matches(str(place), item)
        found = sorted(Path(match) for match in matches if not os.path.isdir(match))
        if not found:
            raise _path_error(item, "no file matches this pattern", "check the pattern")
    else:
        hint = _path_hint(place)
        if not any_suffix and _LIKE_AN_ID.fullmatch(item) and not place.parent.exists():
            hint += (
                f"; if it is a dataset of the Hugging Face hub, set dataset = {item!r} and no dataset_path"
            )
        raise _path_error(item, "there is no such file or folder", hint)
    for file in found:
        if not any_suffix and not file.name.endswith(SUFFIXES):
            raise _path_error(item, f"{file.name!r} is not a text corpus", f"name a {READ} file")
    return Found(tuple(Path(os.path.abspath(file)) for file in found))


def _is_saved_dataset(place: Path) -> bool:
    """Say if ``save_to_disk`` wrote this folder."""
    one = all(os.path.isfile(place / name) for name in ("state.json", "dataset_info.json"))
    return one or os.path.isfile(place / "dataset_dict.json")


def _walk(top: Path) -> Iterator[Path]:
    for here, names in _folders(top, str(top)):
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _folders(top: str | Path, item: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, each once whatever links lead to it, with the names of their files.

    Raises:
        SourceError: there are so many that ``item`` cannot mean them, or one of them cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # it has gone
            rule = f"the folder {error.filename} cannot be read: {error.strerror}"
            raise _path_error(item, rule, "make it readable, or name what shall be read")

    seen, entries = set(), 0
    for here, folders, names in os.walk(top, followlinks=True, onerror=refuse):
        try:
            status = os.stat(here)
        except OSError:  # it has gone
            continue
        entries += 1 + len(names)
        if entries > MAX_ENTRIES:
            rule = f"there are more than {MAX_ENTRIES:,} files and folders below {top}"
            raise _path_error(item, rule, "name the folder that holds the text")
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield here, names


def _matches(pattern: str, item: str) -> Iterator[str]:
    """Paths that a glob names. That of Python follows links that go in circles, some forty times round."""
    head, recursive, tail = re.sub(r"(^|/)\*\*$", r"\1**/*", pattern).partition("**/")
    if not recursive or (head and not head.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for top in glob.iglob(head) if head else ["."]:
        for here, _ in _folders(top, item):
            yield from _matches(os.path.join(glob.escape(here), tail), item)


def _path_hint(place: Path) -> str:
    parent = place.absolute()
    while not parent.is_dir():
        parent = parent.parent
    beside = os.listdir(parent) if parent == place.absolute().parent else []
    close = closest(place.name, beside)
    return f"did you mean {place.with_name(close)}?" if close else f"the path exists up to {parent}"


def _path_error(path: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", path))


def check_columns(source: Corpus) -> None:
    """See a missing column before anything is started, by the first file of each kind."""
    first, shape = {kind(path): path for path in reversed(source.files)}, source.shape
    if zst := next((path.name for path in source.files if path.suffix == ".zst"), None):
        require("pyarrow", f"reading {zst}", "dataset_path", source.name)
    if shape and "text" in first:
        rule = f"{first['text'].name} is plain text, and format {shape.format} is read from columns"
        fix = 'name .jsonl or .parquet files, or set the format to "text"'
        raise SourceError(Problem(rule, fix, "dataset_path", source.name))
    if "json" in first:
        _check_first_row(first["json"], source)
    if "rows" in first:
        require("pyarrow", f"reading {first['rows'].name}", "dataset_path", source.name)
        from toolkit.data import parquet  # some tenths of a second

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
