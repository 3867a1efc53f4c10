"""JSON files that are one array: the rows and tokens of the same rows in lines, and row numbers in errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.corpus_problem import check_source
from tests.data.test_parquet import ROWS, build, files_of, write
from toolkit.data import json_arrays, text_files
from toolkit.data.chat.empty_masks import source_of
from toolkit.data.chat.shapes import Shape
from toolkit.data.sources import open_corpus
from toolkit.data.text_files import TextChunk
from toolkit.errors import DataError

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab"\\[]{},\n\x1e é😀'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('a,]"', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def chunks(content: str | bytes, size: int) -> list[TextChunk]:
    data = content.encode() if isinstance(content, str) else content
    raw = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return list(text_files._file_chunks(Path("a.json"), raw, size))


@given(
    rows=st.lists(st.dictionaries(st.text("a,", max_size=2), _VALUES, max_size=3), min_size=1, max_size=9),
    indent=st.sampled_from([None, 0, 2]),
    ascii=st.booleans(),
    size=st.integers(4, 200),
    around=st.sampled_from(["", "\n", "\ufeff"]),
)
def test_rows_come_back_whatever_they_are_cut_into(
    rows: list[dict[str, Any]], indent: int | None, ascii: bool, size: int, around: str
) -> None:
    data = (around + json.dumps(rows, indent=indent, ensure_ascii=ascii) + around.strip("\ufeff")).encode()
    found = chunks(data, size)
    assert [place for chunk in found for place in chunk.rows()] == list(enumerate(rows))
    for chunk in found:
        assert chunk.line == data[: chunk.offset].count(b"\n") + 1
    assert sum(chunk.n_file_bytes for chunk in found) == len(data)


@pytest.mark.parametrize(
    ("suffix", "indent"), [(".json", 4), (".jsonl", None), (".json.gz", None), (".json.zst", 1)]
)
def test_an_array_gives_the_token_files_of_its_lines(tmp_path: Path, suffix: str, indent: int | None) -> None:
    from tests.data.test_sources import _write

    expected = build(write(tmp_path / "lines.jsonl", ROWS), "text", tmp_path / "cache")
    array = _write(tmp_path / f"array{suffix}", json.dumps(ROWS, indent=indent))
    with mock.patch.object(text_files, "CHUNK_BYTES", 700):
        assert files_of(build(array, "text", tmp_path / "cache", processes=2)) == files_of(expected)
    problem = check_source("x", str(array), "content")
    assert problem is not None and "row 0 has no such column; it has 'id'" in problem.rule


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"},\n\n {"text": 5}]', r"a.json, row 1: column 'text' contains a JSON number"),
        ('[{"text": "a"},\n\n {"text" 5}]', r"row 1 \(line 3\): not valid JSON \(Expecting ':'"),
        ('[{"text": "a"},\n null]', r"row 1 \(line 2\): a JSON null\n  fix:  each row of the array"),
        ('[{"text": "a"},\n]', r"row 1 \(line 2\): not valid JSON"),
        ('[{"text": "a"} {"text": "b"}]', r"row 0 \(line 1\): not valid JSON \(Extra data"),
        ('[{"text": "a\nb"}]', r"row 0 \(line 1\): not valid JSON \(Invalid control"),
        ('[{"text": "a"}, {"text": "b', r"row 1 \(line 1\): not valid JSON \(Unterminated"),
        ('[{"text": "a"}, {"text": "b"}\n', r"does not end: no comma or bracket follows row 1"),
        ('[{"text": "a"}]\n[{"text": "b"}]\n', r"something follows the array that begins it\n  fix:"),
        (b'[{"text": "a"},\n {"text": "\xff"}]', r"line 2 \(byte 27\): byte 0xff is not UTF-8"),
        ('[{"text": ' + "[" * 100_000, r"row 0 .*nested too deep"),
        (
            '{\n "data": [{"text": "a"}]}',
            r"line 1: not valid JSON.*\n  fix:  .*or the file one array of objects",
        ),
    ],
)
@pytest.mark.parametrize("size", [4, 1 << 16])
def test_a_mistake_is_reported_with_its_row(content: str | bytes, message: str, size: int) -> None:
    with pytest.raises(DataError, match=message):
        [text for chunk in chunks(content, size) for text in chunk.texts("text")]


def test_an_array_without_rows_holds_no_document() -> None:
    for content in ("[]", " [ \n] \n", "\ufeff[]"):
        assert chunks(content, 4) == []


def test_a_row_without_an_end_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_arrays, "ROW_BYTES", 1000)
    with pytest.raises(DataError, match=r"row 1 has more than 1,000 bytes.*\n  fix:  .*JSON object per line"):
        chunks('[{"text": "a"}, {"text": "' + "b" * 5000, 100)


def test_conversations_without_loss_are_named_by_row(tmp_path: Path) -> None:
    (tmp_path / "alpaca_data.json").write_text(
        json.dumps([{"instruction": "Say it.", "input": "", "output": "It."}] * 3, indent=2)
    )
    source = open_corpus("x", str(tmp_path), shape=Shape("alpaca"))
    assert [place for chunk in source.chunks() for place, _ in chunk.rows()] == [0, 1, 2]
    assert source_of((str(source.files[0]),), [0, 2]).endswith("alpaca_data.json, row 2")  # type: ignore[arg-type]
