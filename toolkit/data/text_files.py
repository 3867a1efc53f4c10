"""Text and JSON-lines files as a stream of bounded pieces.

A ``.txt`` file is one document. A ``.jsonl`` (or ``.json``) file has one JSON object a line, a document
in its columns. Either may be gzipped (``.txt.gz``, ``.jsonl.gz``).

A piece is about 1 MiB of a file: whole lines of JSON, or a segment of a text file
(:mod:`toolkit.data.text_segments`).
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from toolkit.config.local_paths import open_regular
from toolkit.data.columns import template_for
from toolkit.data.corpus import is_json
from toolkit.errors import DataError
from toolkit.io.json_fields import parse_json

PIECE_BYTES = 1 << 20
REPLACE = "\n  fix:  repair the file, or name another"
_BOM = "\ufeff"


class Piece(Protocol):
    """About 1 MiB of a file, which a process can turn into texts by itself.

    ``opens`` and ``closes`` say whether its first and its last text begin and end a document.
    ``n_file_bytes`` is how many bytes of the file on disk it covers. ``unit`` is what its rows are counted
    in.
    """

    unit: ClassVar[str]

    @property
    def path(self) -> Path: ...
    @property
    def opens(self) -> bool: ...
    @property
    def closes(self) -> bool: ...
    @property
    def n_file_bytes(self) -> int: ...
    def texts(self, text_column: str) -> list[str]:
        """The texts of this piece, empty ones left out. Raises DataError with file and place."""

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The rows of this piece, each with its line or row in the file. Raises DataError with file and
        place."""


@dataclass(frozen=True)
class TextPiece:
    """A :class:`Piece` cut where a line ends.

    ``offset`` and ``line`` (from 1) say where in the (decompressed) file it begins.
    """

    unit: ClassVar[str] = "line"

    path: Path
    is_json: bool
    data: bytes
    offset: int
    line: int
    opens: bool
    closes: bool
    n_file_bytes: int

    def texts(self, text_column: str) -> list[str]:
        if not self.is_json:
            # An empty middle of a document cannot be: only an empty file gives an empty text.
            return [text] if (text := self._text()) else []
        found = (_row_text(row, text_column, self.path, line) for line, row in self.rows())
        return [text for text in found if text]

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for line, row in enumerate(self._text().split("\n"), start=self.line):
            if row and not row.isspace():
                yield line, _read_row(row, self.path, line)

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


def read_pieces(path: Path, size: int = 0) -> Iterator[TextPiece]:
    """The pieces of a file of about ``size`` bytes, or ``PIECE_BYTES``, in order. Raises DataError for a file
    that cannot be read."""
    try:
        with open_regular(path) as raw:
            yield from _file_pieces(path, raw, size or PIECE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}{REPLACE}") from error


def first_line(path: Path) -> TextPiece | None:
    """The first line of a file, to see a missing column before anything is started; None where it is longer
    than a piece, which waits for the reading."""
    try:
        with open_regular(path) as raw:
            stream: BinaryIO = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
            line = stream.readline(PIECE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}{REPLACE}") from error
    return TextPiece(path, True, line, 0, 1, True, True, 0) if line.endswith(b"\n") else None


def _read_row(row: str, path: Path, line: int) -> dict[str, Any]:
    try:
        values = parse_json(row)
    except ValueError as error:
        raise DataError(
            f"{path}, line {line}: not valid JSON ({error})\n  fix:  each line must be one JSON object"
        ) from None
    if not isinstance(values, dict):
        raise DataError(
            f"{path}, line {line}: a JSON {_json_type(values)}\n  fix:  each line must be one JSON object"
        )
    return values


def _row_text(values: Mapping[str, Any], text_column: str, path: Path, line: int) -> str:
    template = template_for(text_column, values, f"{path}, line {line}")
    for column in template.columns:
        check_text(values[column], f"{path}, line {line}: column {column!r}")
    return template.fill([values[column] for column in template.columns])


def check_text(value: object, where: str) -> None:
    """Raise DataError where a row's value is no text; null is none at all."""
    if value is None:
        return
    if not isinstance(value, str):
        raise DataError(
            f"{where} holds a JSON {_json_type(value)}\n"
            f"  fix:  a text column must hold a string, or null for no text, on every line"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half a surrogate pair, \\u{ord(value[error.start]):04x}, at character "
            f"{error.start}\n  fix:  repair the line"
        ) from None


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), f"value of type {type(value).__name__}")


def _file_pieces(path: Path, raw: io.BufferedReader, size: int) -> Iterator[TextPiece]:
    stream: BinaryIO = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]
    json_lines = is_json(path)
    blocks = _line_blocks(stream, size)
    if not json_lines:
        from toolkit.data.text_segments import text_segments

        blocks = text_segments(stream, size)
    offset, line, file_offset = 0, 1, 0
    for data, last in blocks:
        n_file_bytes = raw.tell() - file_offset
        yield TextPiece(path, json_lines, data, offset, line, json_lines or offset == 0, last, n_file_bytes)
        offset, line, file_offset = (offset + len(data), line + data.count(b"\n"), file_offset + n_file_bytes)


def _line_blocks(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    while data := stream.read(size) + stream.readline():
        yield data, True
