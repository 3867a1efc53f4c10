"""Parquet files, and the Arrow files of Hugging Face datasets, as a stream of bounded chunks.

Only the needed columns are read. A Parquet file is decoded a few thousand rows at a time, or fewer if
documents are long; an Arrow file in the batches in which it was written. Chunks of about 1 MiB are yielded.
Needs the extra ``hf``, and is imported only for such files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from toolkit.config.local_paths import open_regular
from toolkit.data import text_files
from toolkit.data.columns import Template, template_for
from toolkit.data.file_kinds import RowShape
from toolkit.data.text_files import REPLACE
from toolkit.errors import DataError, quote
from toolkit.io.json_fields import parse_json

BATCH_ROWS = 4096  # upper bound, if statistics underestimate the documents
SAMPLED_FILES = 16  # number of footers to read for an estimate of a corpus's text


@dataclass(frozen=True)
class RowChunk:
    """A chunk (:class:`toolkit.data.text_files.Chunk`) of whole rows of a file, starting at ``row`` (from 0).

    ``data`` is an Arrow stream of one record batch with only the needed columns.
    """

    path: Path
    data: bytes
    row: int
    n_file_bytes: int
    unit: ClassVar[str] = "row"
    opens: ClassVar[bool] = True
    closes: ClassVar[bool] = True

    def texts(self, text_column: str) -> list[str]:
        batch = self._batch()
        template = template_for(text_column, batch.schema.names, str(self.path))
        with self._decoding(batch):
            columns = [batch.column(name).to_pylist() for name in template.columns]
        return [text for text in map(template.fill, zip(*columns, strict=True)) if text]

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        batch = self._batch()
        with self._decoding(batch):
            rows = [_plain(row, pa.struct(batch.schema)) for row in batch.to_pylist()]
        yield from enumerate(rows, start=self.row)

    def _batch(self) -> pa.RecordBatch:
        with pa.ipc.open_stream(self.data) as stream:
            return stream.read_next_batch()

    @contextlib.contextmanager
    def _decoding(self, batch: pa.RecordBatch) -> Iterator[None]:
        try:
            yield
        except (ValueError, OverflowError, LookupError, pa.ArrowException) as error:
            said = f"a text is not UTF-8 ({error.reason})" if isinstance(error, UnicodeDecodeError) else error
            rows = f"rows {self.row:,} to {self.row + batch.num_rows - 1:,}"
            raise DataError(f"{self.path}, in {rows}: {said}{REPLACE}") from None


def read_shaped(path: Path, shape: RowShape) -> Iterator[RowChunk]:
    """Yield the chunks of a file whose rows have ``shape``, in order, with the columns of the shape."""
    with _errors(path):
        columns = _columns(path, shape)
        batches = _parquet_batches if path.suffix == ".parquet" else _arrow_batches
        row = position = 0
        for batch, end in batches(path, columns):
            rows = batch.select(list(columns))
            at_once = max(1, rows.num_rows * text_files.CHUNK_BYTES // max(1, rows.nbytes))
            for start in range(0, rows.num_rows, at_once):
                last = start + at_once >= rows.num_rows
                chunk = rows[start : start + at_once]
                yield RowChunk(path, _stream(chunk), row + start, (end - position) * last)
            row, position = row + rows.num_rows, end


def read_chunks(path: Path, text_column: str, size: int = 0) -> Iterator[RowChunk]:
    """Yield the chunks of a Parquet or Arrow file in order, like
    :func:`toolkit.data.text_files.read_chunks`."""
    with _errors(path):
        template = _template(path, _schema(path), text_column)
        batches = _parquet_batches if path.suffix == ".parquet" else _arrow_batches
        row = position = 0
        for batch, end in batches(path, template.columns):
            names = list(dict.fromkeys(template.columns))
            strings = [_as_strings(batch.column(name)) for name in names]
            rows = pa.RecordBatch.from_arrays(strings, names=names)
            for start, stop in itertools.pairwise(_cuts(rows, size or text_files.CHUNK_BYTES)):
                last = stop == rows.num_rows
                yield RowChunk(path, _stream(rows[start:stop]), row + start, (end - position) * last)
            row, position = row + rows.num_rows, end


def check_schema(path: Path, text_column: str) -> None:
    """Raise DataError if the file's schema lacks a column, or a column does not contain strings."""
    with _errors(path):
        _template(path, _schema(path), text_column)


def check_shape(path: Path, shape: RowShape) -> None:
    """Raise DataError if the file's schema lacks a column of ``shape``."""
    with _errors(path):
        _columns(path, shape)


def text_bytes(paths: list[Path], text_column: str) -> int:
    """Estimate the bytes of text from the metadata of some files and the sizes of all files."""
    sampled = paths[:: -(-len(paths) // SAMPLED_FILES)] if paths else []
    on_disk = sum(path.stat().st_size for path in sampled)
    text = sum(_file_text_bytes(path, text_column) for path in sampled)
    return round(sum(path.stat().st_size for path in paths) * text / max(1, on_disk))


def _file_text_bytes(path: Path, text_column: str) -> int:
    if path.suffix != ".parquet":
        return path.stat().st_size
    with _errors(path), pq.ParquetFile(path) as file:
        columns = _template(path, file.schema_arrow, text_column).columns
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        return sum(_column_bytes(group, columns) for group in groups)


def _column_bytes(group: Any, columns: tuple[str, ...]) -> int:
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        # A list of messages is stored as messages.list.element.content and so on.
        if chunk.path_in_schema in columns or chunk.path_in_schema.partition(".")[0] in columns
    )


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read: {error}{REPLACE}") from error


def _readable(path: Path) -> Any:
    """Return the source from which Arrow reads a file: its path, or an open remote file."""
    return path if isinstance(path, Path) else open_regular(path)


def _schema(path: Path) -> pa.Schema:
    if path.suffix == ".parquet":
        return pq.read_schema(_readable(path))
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        return stream.schema


def _columns(path: Path, shape: RowShape) -> tuple[str, ...]:
    names = _schema(path).names
    columns = tuple(shape.columns(names, str(path)))
    _check_single(path, names, columns)
    return columns


def _check_single(path: Path, names: list[str], columns: tuple[str, ...]) -> None:
    if twice := [column for column in columns if names.count(column) > 1]:
        raise DataError(f"{path}: there are several columns {twice[0]!r}{REPLACE}")


def _template(path: Path, schema: pa.Schema, text_column: str) -> Template:
    template = template_for(text_column, schema.names, str(path))
    _check_single(path, schema.names, template.columns)
    for column in template.columns:
        kind = schema.field(column).type
        if not _holds_strings(kind):
            raise DataError(
                f"{path}: column {column!r} contains {kind}\n  fix:  the text column must contain strings"
            )
    return template


def _holds_strings(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_strings(kind.value_type)
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def _parquet_batches(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield (rows, bytes of the file so far), decoding each row group in steps."""
    size = path.stat().st_size
    options = {"buffer_size": text_files.CHUNK_BYTES, "page_checksum_verification": True}
    with pq.ParquetFile(_readable(path), **options) as file:
        total, done = file.metadata.num_rows, 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            mean = _column_bytes(group, columns) // max(1, group.num_rows)
            n_rows = min(BATCH_ROWS, max(1, text_files.CHUNK_BYTES // max(1, mean)))
            for batch in file.iter_batches(n_rows, row_groups=[number], columns=list(columns)):
                done += batch.num_rows
                yield batch, size * done // total


def _arrow_batches(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield (rows, bytes of the file so far), without copying the memory-mapped file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            yield batch, source.tell()


def _as_strings(column: pa.Array) -> pa.Array:
    """Convert to one of the two string types with known lengths; dictionaries and views are expanded."""
    return column if pa.types.is_string(column.type) else column.cast(pa.large_string())


def _cuts(rows: pa.RecordBatch, size: int) -> list[int]:
    """Return the boundaries of chunks of about ``size`` bytes: 0, …, the number of rows."""
    lengths = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        lengths += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    number = (np.cumsum(lengths) - lengths) // size
    starts = np.flatnonzero(np.diff(number)) + 1
    return [0, *starts.tolist(), rows.num_rows] if rows.num_rows else [0]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Convert a value to its form in JSON lines: a map becomes an object, and a JSON text its value."""
    if value is None or isinstance(value, str) and pa.types.is_string(kind):
        return value
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        items: dict[str, Any] = {}
        for key, item in value:
            if str(key) in items:
                raise ValueError(f"a map has the key {quote(str(key))} twice")
            items[str(key)] = _plain(item, kind.item_type)
        return items
    if isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    return parse_json(value) if isinstance(kind, pa.JsonType) else value


def _stream(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(
            rows
        )  # writes only these rows; pickle would include the batch from which they are sliced
    return sink.getvalue().to_pybytes()
