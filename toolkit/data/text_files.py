"""Text and JSON files as a stream of bounded chunks.

A ``.txt`` file is one document. A ``.jsonl`` (or ``.json``) file has one JSON object per line, with a
document in its columns, or is one array of such objects (:mod:`toolkit.data.json_arrays`). Both kinds may be
compressed (``.txt.gz``, ``.jsonl.zst``).

A chunk is about 1 MiB of a file: whole JSON rows or a segment of a text file
(:mod:`toolkit.data.text_segments`).
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from toolkit.config.local_paths import open_regular
from toolkit.data.columns import template_for
from toolkit.data.file_kinds import is_json, kind
from toolkit.data.json_arrays import BETWEEN, array_blocks, begins_array
from toolkit.errors import DataError
from toolkit.io.json_fields import parse_json

CHUNK_BYTES = 1 << 20
_FIRST_BLOCK = 1 << 16
REPLACE = "\n  fix:  repair the file, or use another"
_BOM = "\ufeff"
_LINES = "each line must be one JSON object, or the file one array of objects"
_ROWS = "each row of the array must be one JSON object"
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Chunk(Protocol):
    """About 1 MiB of a file, which any process can convert to texts.

    ``opens`` means that the chunk's first text starts a document; ``closes``, that its last text ends one.
    ``n_file_bytes`` is the number of bytes that it covers in the file on disk. ``unit`` is the unit in which
    its rows are counted.
    """

    @property
    def unit(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def opens(self) -> bool: ...
    @property
    def closes(self) -> bool: ...
    @property
    def n_file_bytes(self) -> int: ...
    def texts(self, text_column: str) -> list[str]:
        """Return the non-empty texts of this chunk. Raises DataError with file and position."""

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the rows of this chunk with their line or row number in the file. Raises DataError with file
        and position."""


@dataclass(frozen=True)
class TextChunk:
    """A :class:`Chunk` that ends at a line end.

    ``offset`` and ``line`` (from 1) are its start in the (decompressed) file. In an array, the chunk ends
    between two rows, and ``row`` is the number of its first row (from 0, as in Parquet).
    """

    path: Path
    is_json: bool
    data: bytes
    offset: int
    line: int
    opens: bool
    closes: bool
    n_file_bytes: int
    row: int | None = None

    @property
    def unit(self) -> str:
        return "line" if self.row is None else "row"

    def texts(self, text_column: str) -> list[str]:
        if not self.is_json:
            # Only an empty file has an empty text; no part of a document is empty.
            return [text] if (text := self._text()) else []
        where = f"{self.path}, {self.unit}"
        texts = (row_text(row, text_column, f"{where} {number}") for number, row in self.rows())
        return [text for text in texts if text]

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        text, line = self._text(), self.line
        if self.row is None:
            for number, row in enumerate(text.split("\n"), start=line):
                if row and not row.isspace():
                    yield number, _read_row(row, f"{self.path}, line {number}", _LINES)
            return
        for number, row in enumerate(text.removesuffix(BETWEEN).split(BETWEEN), start=self.row):
            json = row.lstrip()
            begin = line + row.count("\n", 0, len(row) - len(json))
            yield number, _read_row(json, f"{self.path}, row {number} (line {begin})", _ROWS)
            line += row.count("\n")

    def _text(self) -> str:
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise DataError(
                f"{self.path}, line {line} (byte {self.offset + error.start}): byte "
                f"0x{self.data[error.start]:02x} is not UTF-8 ({error.reason})\n"
                f"  fix:  convert the file, for example with `iconv -t UTF-8`"
            ) from None
        return text.removeprefix(_BOM) if self.offset == 0 else text


def read_chunks(path: Path, size: int = 0) -> Iterator[TextChunk]:
    """Yield a file's chunks of about ``size`` bytes, or ``CHUNK_BYTES``, in order. Raises DataError if the
    file cannot be read."""
    try:
        with open_regular(path) as raw:
            yield from _file_chunks(path, raw, size or CHUNK_BYTES)
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}{REPLACE}") from error


def first_row(path: Path) -> TextChunk | None:
    """Return the first line of a JSON file, or the first row of an array, to detect missing columns before a
    run starts.

    Returns None for a line longer than a chunk, which is checked only when it is read.
    """
    try:
        with open_regular(path) as raw:
            stream = _decompressed(path, raw)
            line = stream.readline(CHUNK_BYTES)
            if begins_array(line):
                data, _ = next(array_blocks(path, stream, line, _FIRST_BLOCK), (b"", True))
                line = data.partition(BETWEEN.encode())[0]
                return TextChunk(path, True, line, 0, 1, True, True, 0, row=0) if line else None
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}{REPLACE}") from error
    return TextChunk(path, True, line, 0, 1, True, True, 0) if line.endswith(b"\n") else None


def unit_of(path: Path) -> str:
    """Return the unit in which a file's rows are counted, as in the ``unit`` of its chunks."""
    if kind(path) == "rows":
        return "row"
    with contextlib.suppress(DataError):
        first = first_row(path)
        return first.unit if first else "line"
    return "line"


def _read_row(row: str, where: str, rule: str) -> dict[str, Any]:
    try:
        values = parse_json(row)
        what = f"a JSON {_json_type(values)}"
    except ValueError as error:
        values, what = None, f"not valid JSON ({error})"
    if isinstance(values, dict):
        return values
    raise DataError(f"{where}: {what}\n  fix:  {rule}")


def row_text(values: Mapping[str, Any], text_column: str, where: str) -> str:
    """Return the text of a row, in a column or template. Raises DataError if a column is missing or its value
    is not a string or null."""
    template = template_for(text_column, values, where)
    for column in template.columns:
        check_text(values[column], f"{where}: column {column!r}")
    return template.fill([values[column] for column in template.columns])


def check_text(value: object, where: str) -> None:
    """Raise DataError if a row's value is not a string or null."""
    if value is None:
        return
    if not isinstance(value, str):
        raise DataError(
            f"{where} contains a JSON {_json_type(value)}\n"
            f"  fix:  a text column must contain a string, or null for no text, on every line"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has an unpaired surrogate, \\u{ord(value[error.start]):04x}, at character "
            f"{error.start}\n  fix:  repair the line"
        ) from None


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), f"value of type {type(value).__name__}")


def _file_chunks(path: Path, raw: io.BufferedReader, size: int) -> Iterator[TextChunk]:
    stream, has_rows, row = _decompressed(path, raw), is_json(path), None
    if not has_rows:
        from toolkit.data.text_segments import text_segments

        blocks = text_segments(stream, size)
    elif begins_array(head := stream.read(size)):
        blocks, row = array_blocks(path, stream, head, size), 0
    else:
        blocks = _line_blocks(stream, head, size)
    offset, line, file_offset = 0, 1, 0
    for data, last in blocks:
        n_file_bytes = raw.tell() - file_offset
        yield TextChunk(path, has_rows, data, offset, line, has_rows or offset == 0, last, n_file_bytes, row)
        offset, line, file_offset = (offset + len(data), line + data.count(b"\n"), file_offset + n_file_bytes)
        row = None if row is None else row + data.count(BETWEEN.encode())


def _line_blocks(stream: BinaryIO, head: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    while data := head + stream.readline():
        yield data, True
        head = stream.read(size)


def _decompressed(path: Path, raw: io.BufferedReader) -> BinaryIO:
    """Decompress an open file according to its suffix; the result has ``peek``, like a BufferedReader."""
    if path.suffix == ".zst":
        import pyarrow  # the import takes tenths of a second

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers[path.suffix](raw) if path.suffix in openers else raw)
