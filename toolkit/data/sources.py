"""Where text comes from: files found by name, folder or glob, or a dataset of the Hugging Face hub.

Text, JSON lines, Parquet (:mod:`toolkit.data.text_files`, :mod:`toolkit.data.parquet`), and folders that
``datasets.save_to_disk`` wrote. The corpus is the files in sorted order, the documents of each in file
order. A dataset of the hub is only named here, and is fetched when its tokens are first needed
(:mod:`toolkit.data.hub`).
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.columns import RowShape, SourceError, is_json
from toolkit.errors import ConfigError, DataError, Problem, closest, did_you_mean, install

if TYPE_CHECKING:
    from toolkit.data.text_files import Piece

EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
EMBEDDED = {
    "embedded": "train.jsonl.gz",
    "c4_test": "train.jsonl.gz",
    "embedded_validation": "validation.jsonl.gz",
    "c4_validation": "validation.jsonl.gz",
}
STAND_INS = {"c4_test": "embedded", "c4_validation": "embedded_validation"}
"""torchtitan's names for samples of C4, which run offline on the embedded books, and the names of these."""
TEXT_SUFFIXES = (".txt", ".jsonl", ".json", ".txt.gz", ".jsonl.gz", ".json.gz")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
_LIKE_AN_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MAX_ENTRIES = 500_000  # of a folder that is searched, folders included
COMPRESSION = 3  # compressed text is about three times as long as its file


@dataclass(frozen=True)
class Corpus:
    """An ordered list of files. ``name`` is what the user called it.

    ``identity`` names the contents where they are known without reading the files. With a ``shape`` its
    rows are more than texts: conversations, or texts with a class.
    """

    name: str
    files: tuple[Path, ...]
    text_column: str
    identity: str = ""
    shape: RowShape | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the files on disk, compressed as they are."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def n_text_bytes(self) -> int:
        """About how many bytes of text there are."""
        rows = [path for path in self.files if kind(path) == "rows"]
        others = [path for path in self.files if kind(path) != "rows"]
        size = sum(path.stat().st_size * (COMPRESSION if path.suffix == ".gz" else 1) for path in others)
        if self.shape:
            return size + sum(path.stat().st_size * COMPRESSION for path in rows)
        return size + (_parquet().text_bytes(rows, self.text_column) if rows else 0)

    def pieces(self) -> Iterator[Piece]:
        """Every file, in order, as pieces. Raises DataError for a file that cannot be read."""
        for path in self.files:
            if kind(path) == "rows" and self.shape:
                yield from _parquet().read_shaped(path, self.shape)
            elif kind(path) == "rows":
                yield from _parquet().read_pieces(path, self.text_column)
            else:
                from toolkit.data import text_files

                yield from text_files.read_pieces(path)

    def fetched(self, cache_folder: Path, *, progress: bool, max_bytes: float, again: bool) -> Corpus:
        """The source with its files at hand, which these are."""
        return self


def kind(path: Path) -> str:
    """Tell a file's kind by its name: "text", "json", or "rows" of columns."""
    if path.suffix in (".parquet", ".arrow"):
        return "rows"
    return "json" if is_json(path) else "text"


def open_corpus(
    name: str,
    path: str | None,
    text_column: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
    shape: RowShape | None = None,
) -> Corpus:
    """Find a corpus: the files at ``path`` where it is given, else what is called ``name``.

    ``path`` is a file, a folder (searched with its subfolders, or written by ``save_to_disk``), a glob, or
    several of these with commas between. ``name`` is an embedded corpus or, with its owner, a dataset of
    the Hugging Face hub; ``subset`` and ``split`` choose from the latter. Costs milliseconds and no
    network; the columns are looked up in the first line or the schema of the first file that has any.

    Raises:
        SourceError: unknown name, no such path, no text files there, missing column or package.
    """
    if path is not None:
        source = Corpus(path, _find(path, split=split), text_column, shape=shape)
    elif name in EMBEDDED:
        source = Corpus(name, (EMBEDDED_FOLDER / EMBEDDED[name],), "text", shape=shape)
        if shape is None:
            return source  # it has this column
    else:
        return _hub_source(name, text_column, subset, split, shape)
    _check_columns(source)
    return source


def open_text(path: str, text_column: str = "text") -> Corpus:
    """The files at ``path`` that a program is to read, as :func:`open_corpus` finds them; one that is named
    may have any suffix, and is text then.

    Raises:
        SourceError: as :func:`open_corpus`.
        ConfigError: another column than "text" is named, and no file there has columns.
    """
    source = Corpus(path, _find(path, any_suffix=True), text_column)
    if text_column != "text" and all(kind(file) == "text" for file in source.files):
        raise ConfigError(Problem(f"no file of {path} has columns", "remove it", "text_column", text_column))
    _check_columns(source)
    return source


def check_source(
    name: str,
    path: str | None,
    text_column: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
    shape: RowShape | None = None,
) -> Problem | None:
    """The problem of a corpus, as far as can be seen in milliseconds, or None."""
    try:
        open_corpus(name, path, text_column, subset=subset, split=split, shape=shape)
    except DataError as error:
        return problem_of(error, path)
    return None


def problem_of(error: DataError, path: str | None) -> Problem:
    """Return as a problem the error that :func:`open_corpus` has raised."""
    if isinstance(error, SourceError):
        return error.problems[0]
    rule, _, fix = str(error).partition("\n  fix:  ")
    return Problem(rule, fix, "dataset_path", path)


def choices_read(name: str, path: str | None) -> set[str]:
    """Which of "subset" and "split" mean something for a corpus."""
    if path is not None:
        return {"split"} if Path(os.path.expanduser(path), "dataset_dict.json").is_file() else set()
    return set() if name in EMBEDDED else {"subset", "split"}


def check_name(name: str) -> Problem | None:
    """Check that a corpus can be called ``name``; None if so."""
    if name in EMBEDDED or "/" in name:
        return None
    from toolkit.data import hub

    if name in hub.KNOWN:
        return None
    names = ", ".join([*EMBEDDED, *hub.KNOWN])
    there = (
        f"the names are {names}; a dataset of the Hugging Face hub is named with its owner, such as "
        f"Salesforce/wikitext; for files of your own set dataset_path"
    )
    fix = did_you_mean(name, [*EMBEDDED, *hub.KNOWN], there)
    return Problem("there is no dataset of this name", fix, "dataset", name)


def _hub_source(
    name: str, text_column: str, subset: str | None, split: str, shape: RowShape | None
) -> Corpus:
    from toolkit.data import hub

    if unknown := check_name(name):
        raise SourceError(unknown)
    if os.path.exists(os.path.expanduser(name)):
        rule = "this is a file or folder here, where dataset names a corpus"
        raise SourceError(Problem(rule, f"set dataset_path = {name!r}", "dataset", name))
    _require("datasets", "a dataset of the Hugging Face hub", "dataset", name)
    return hub.named(name, text_column, subset, split, shape)


def _require(package: str, what: str, key: str, value: str | None) -> None:
    if importlib.util.find_spec(package) is None:
        rule = f"{what} needs the package {package}, which is not installed"
        raise SourceError(Problem(rule, install("hf"), key, value))


def _parquet():  # type: ignore[no-untyped-def]  # the module, which costs some tenths of a second to import
    from toolkit.data import parquet

    return parquet


def _find(path: str, *, split: str = "train", any_suffix: bool = False) -> tuple[Path, ...]:
    # A path that exists is taken whole, so that a comma or a bracket in a name does no harm.
    items = [path] if os.path.exists(os.path.expanduser(path)) else [item.strip() for item in path.split(",")]
    found: dict[str, Path] = {}
    for item in filter(None, items):
        for file in _find_item(item, split, any_suffix=any_suffix):
            found.setdefault(os.path.realpath(file), file)  # whatever links name it
    files = tuple(found.values())
    for file in files:
        if os.path.exists(file) and not os.path.isfile(file):
            raise _path_error(path, f"{file} is no regular file", "name files of text")
        if not os.access(file, os.R_OK):
            raise _path_error(path, f"{file} cannot be read", "give this user permission to read it")
    if not files:
        raise _path_error(path, "it names no file", "name a file, a folder or a glob")
    return files


def _find_item(item: str, split: str, *, any_suffix: bool) -> list[Path]:
    place = Path(os.path.expanduser(item))
    if _is_saved_dataset(place):
        from toolkit.data import hub

        return hub.saved_files(place.absolute(), split)
    if place.is_dir():
        found = sorted(file for file in _walk(place) if file.name.endswith(SUFFIXES))
        if not found:
            raise _path_error(item, f"the folder holds no {', '.join(SUFFIXES)} file", "check the folder")
    elif os.path.exists(place):
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
            raise _path_error(
                item, f"{file.name!r} is not a text corpus", f"use one of {', '.join(SUFFIXES)}"
            )
    return [Path(os.path.abspath(file)) for file in found]


def _is_saved_dataset(place: Path) -> bool:
    """Say if ``save_to_disk`` wrote this folder."""
    one = (place / "state.json").is_file() and (place / "dataset_info.json").is_file()
    return one or (place / "dataset_dict.json").is_file()


def _walk(top: Path) -> Iterator[Path]:
    for here, names in _folders(top, str(top)):
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _folders(top: str | Path, item: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and those in it, each once whatever links lead to it, with the names of their files.

    Raises:
        SourceError: there are so many that ``item`` cannot mean them.
    """
    seen, entries = set(), 0
    for here, folders, names in os.walk(top, followlinks=True):
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


def _check_columns(source: Corpus) -> None:
    """See a missing column before anything is started, by the first file of each kind."""
    first, shape = {kind(path): path for path in reversed(source.files)}, source.shape
    if shape and "text" in first:
        rule = f"{first['text'].name} is plain text, and format {shape.format} is read from columns"
        fix = 'name .jsonl or .parquet files, or set the format to "text"'
        raise SourceError(Problem(rule, fix, "dataset_path", source.name))
    if "json" in first:
        _check_first_line(first["json"], source)
    if "rows" in first:
        _require("pyarrow", f"reading {first['rows'].name}", "dataset_path", source.name)
        if shape:
            _parquet().check_shape(first["rows"], shape)
        else:
            _parquet().check_schema(first["rows"], source.text_column)


def _check_first_line(path: Path, source: Corpus) -> None:
    from toolkit.data import text_files

    line = text_files.first_line(path)
    if line is None:
        return
    if not source.shape:
        line.texts(source.text_column)
        return
    for number, row in line.rows():
        source.shape.check(row, f"{line.path}, line {number}")
