"""Where text comes from: files found by name, folder or glob, and read as a stream of bounded pieces.

A ``.txt`` file is one document. A ``.jsonl`` (or ``.json``) file has one JSON object a line, a document
in one of its columns. Either may be gzipped (``.txt.gz``, ``.jsonl.gz``). The corpus is the files in
sorted order, the documents of each in file order.

A piece is about 1 MiB of a file: whole lines of JSON, or a segment of a text file. Where a text file is
cut depends on its bytes alone, never on how many processes read it: after at least 1 MiB, before the
first line that does not begin with white space (there a byte-pair tokenizer gives the ids that it would
give for the uncut text), or, where no such line follows within a further 1 MiB, before a space.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from toolkit.errors import DataError, Problem
from toolkit.wording import closest, did_you_mean

PIECE_BYTES = 1 << 20
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
EMBEDDED = {
    "embedded": "train.jsonl.gz",
    "c4_test": "train.jsonl.gz",
    "embedded_validation": "validation.jsonl.gz",
    "c4_validation": "validation.jsonl.gz",
}
HUB_DATASETS = ("c4",)
SUFFIXES = (".txt", ".jsonl", ".json", ".txt.gz", ".jsonl.gz", ".json.gz")
_BOM = "\ufeff"
_REPLACE = "\n  fix:  repair the file, or name another"


class SourceError(DataError):
    """A corpus cannot be used; ``problem.key`` is dataset, dataset_path or text_column."""

    def __init__(self, problem: Problem):
        self.problem = problem
        super().__init__(str(problem))


@dataclass(frozen=True)
class Piece:
    """About 1 MiB of one file, cut where a line ends.

    ``offset`` and ``line`` (from 1) say where in the (decompressed) file it begins. ``opens`` and
    ``closes`` say whether its first and its last text begin and end a document. ``n_file_bytes`` is how
    many bytes of the file on disk it covers.
    """

    path: Path
    is_json: bool
    data: bytes
    offset: int
    line: int
    opens: bool
    closes: bool
    n_file_bytes: int

    def texts(self, text_column: str) -> list[str]:
        """The texts of this piece, empty ones left out. Raises DataError with file and line."""
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}, line {line} (byte {self.offset + error.start}): byte "
                f"0x{self.data[error.start]:02x} is not UTF-8 ({error.reason})\n"
                f"  fix:  convert the file, for example with `iconv -t UTF-8`"
            ) from None
        if self.offset == 0:
            text = text.removeprefix(_BOM)
        if not self.is_json:
            # An empty middle of a document cannot be: only an empty file gives an empty text.
            return [text] if text else []
        rows = enumerate(text.split("\n"), start=self.line)
        found = (
            _column(row, text_column, self.path, line) for line, row in rows if row and not row.isspace()
        )
        return [text for text in found if text]


@dataclass(frozen=True)
class Source:
    """An ordered list of text files. ``name`` is what the user called it."""

    name: str
    files: tuple[Path, ...]
    text_column: str

    @property
    def n_bytes(self) -> int:
        """Bytes of the files on disk, compressed as they are."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Every file, in order, as pieces. Raises DataError for a file that cannot be read."""
        for path in self.files:
            try:
                with open(path, "rb") as raw:
                    yield from _file_pieces(path, raw)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path}: cannot be read: {error}{_REPLACE}") from error


def is_json(path: Path) -> bool:
    """Whether the file has JSON lines (else it is plain text), by its name."""
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def open_source(
    name: str,
    path: str | None,
    text_column: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
) -> Source:
    """Find a corpus: the files at ``path`` where it is given, else the embedded corpus called ``name``.

    ``path`` is a file, a folder (searched with its subfolders), a glob, or several of these with commas
    between. Costs a few milliseconds; the first line of the first JSON file is read to see its columns.

    Raises:
        SourceError: unknown name, no such path, no text files there, missing column.
    """
    if path is not None:
        source = Source(path, _find(path), text_column)
    else:
        source = Source(name, (EMBEDDED_FOLDER / _embedded(name),), "text")
    _check_first_line(source)
    return source


def check_source(
    name: str,
    path: str | None,
    text_column: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
) -> Problem | None:
    """What is wrong with a corpus, as far as can be seen in milliseconds, or None."""
    try:
        open_source(name, path, text_column, subset=subset, split=split)
    except SourceError as error:
        return error.problem
    except DataError as error:
        rule, _, fix = str(error).partition("\n  fix:  ")
        return Problem(rule, fix, "dataset_path", path)
    return None


def _embedded(name: str) -> str:
    if name in EMBEDDED:
        return EMBEDDED[name]
    if name in HUB_DATASETS or "/" in name:
        rule = f"reading {name!r} from the Hugging Face hub is not built yet"
        fix = "set dataset_path to a local copy (.jsonl or .json.gz files), or use 'c4_test'"
    else:
        rule = "there is no dataset of this name"
        there = f"the names are {', '.join(EMBEDDED)}; for files of your own set dataset_path"
        fix = did_you_mean(name, EMBEDDED, there)
    raise SourceError(Problem(rule, fix, "dataset", name))


def _find(path: str) -> tuple[Path, ...]:
    # A path that exists is taken whole, so that a comma or a bracket in a name does no harm.
    items = [path] if os.path.exists(os.path.expanduser(path)) else [item.strip() for item in path.split(",")]
    files: dict[Path, None] = {}
    for item in filter(None, items):
        files.update(dict.fromkeys(_find_item(item)))
    for file in files:
        if not os.access(file, os.R_OK):
            raise _path_error(path, f"{file} cannot be read", "give this user permission to read it")
    if not files:
        raise _path_error(path, "it names no file", "name a file, a folder or a glob")
    return tuple(files)


def _find_item(item: str) -> list[Path]:
    place = Path(os.path.expanduser(item))
    if place.is_dir():
        found = sorted(file for file in _walk(place) if file.name.endswith(SUFFIXES))
        if not found:
            raise _path_error(item, f"the folder holds no {', '.join(SUFFIXES)} file", "check the folder")
    elif place.exists():
        found = [place]
    elif glob.has_magic(item):
        matches = glob.iglob(str(place), recursive=True)
        found = sorted(Path(match) for match in matches if not os.path.isdir(match))
        if not found:
            raise _path_error(item, "no file matches this pattern", "check the pattern")
    else:
        raise _path_error(item, "there is no such file or folder", _path_hint(place))
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise _path_error(
                item, f"{file.name!r} is not a text corpus", f"use one of {', '.join(SUFFIXES)}"
            )
    return [Path(os.path.abspath(file)) for file in found]


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _path_hint(place: Path) -> str:
    parent = place.absolute()
    while not parent.is_dir():
        parent = parent.parent
    beside = os.listdir(parent) if parent == place.absolute().parent else []
    close = closest(place.name, beside)
    return f"did you mean {place.with_name(close)}?" if close else f"the path exists up to {parent}"


def _path_error(path: str, rule: str, fix: str) -> SourceError:
    return SourceError(Problem(rule, fix, "dataset_path", path))


def _check_first_line(source: Source) -> None:
    """See a missing column before anything is started; a line longer than a piece waits for the reading."""
    path = next(filter(is_json, source.files), None)
    if path is None:
        return
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
            line = stream.readline(PIECE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}{_REPLACE}") from error
    if line.endswith(b"\n"):
        Piece(path, True, line, 0, 1, True, True, 0).texts(source.text_column)


def _column(row: str, column: str, path: Path, line: int) -> str:
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {line}: not valid JSON ({error})\n  fix:  each line must be one JSON object"
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, line {line}: a JSON {_json_type(value)}\n  fix:  each line must be one JSON object"
        )
    if column not in value:
        there = ", ".join(map(repr, value)) or "none"
        rule = f"{path}, line {line} has no such column; it has {there}"
        raise SourceError(
            Problem(rule, "set data.text_column to the one that holds the text", "text_column", column)
        )
    text = value[column]
    if not isinstance(text, str):
        raise DataError(
            f"{path}, line {line}: column {column!r} holds a JSON {_json_type(text)}\n"
            f"  fix:  the text column must hold a string on every line"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {line}: column {column!r} has half a surrogate pair, "
            f"\\u{ord(text[error.start]):04x}, at character {error.start}\n  fix:  repair the line"
        ) from None
    return text


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _file_pieces(path: Path, raw: io.BufferedReader) -> Iterator[Piece]:
    stream: BinaryIO = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
    json_lines = is_json(path)
    blocks = _line_blocks(stream) if json_lines else _text_segments(stream)
    offset, line, file_offset = 0, 1, 0
    for data, last in blocks:
        n_file_bytes = raw.tell() - file_offset
        yield Piece(path, json_lines, data, offset, line, json_lines or offset == 0, last, n_file_bytes)
        offset, line, file_offset = (offset + len(data), line + data.count(b"\n"), file_offset + n_file_bytes)


def _line_blocks(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    while data := stream.read(PIECE_BYTES) + stream.readline():
        yield data, True


def _text_segments(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(segment, whether it is the last one) of a text file."""
    carry = b""
    while data := carry + stream.read(PIECE_BYTES - len(carry)):
        parts, budget = [data], PIECE_BYTES
        while budget > 0 and not (parts[-1].endswith(b"\n") and not stream.peek(1)[:1].isspace()):  # type: ignore[attr-defined]
            if not (rest := stream.readline(budget)):
                break
            parts.append(rest)
            budget -= len(rest)
        data, carry = b"".join(parts), b""
        last = not stream.peek(1)  # type: ignore[attr-defined]
        if not last and not data.endswith(b"\n"):
            cut = _cut(data)
            data, carry = data[:cut], data[cut:]
        yield data, last
        if last:  # also where the file has grown in the meantime
            return


def _cut(data: bytes) -> int:
    """Where to cut inside a line: before a space near the segment's end, else between two characters."""
    space = data.rfind(b" ", len(data) - PIECE_BYTES // 2)
    if space > 0:
        return space
    cut = len(data) - 1
    while cut > len(data) - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
