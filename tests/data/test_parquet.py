"""Parquet files: the same tokens as the same rows in JSON lines, in bounded memory, with plain errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.byte_tokenizer import ByteTokenizer
from tests.data.corpus_problem import check_source
from toolkit.data import parquet, text_files
from toolkit.data.chat.shapes import Conversation, Shape
from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

ROOT = Path(__file__).parents[2]
TEXTS = [
    "one", "", None, "zwei\nLinien \u2028 und \x85 keine", "\ufeffmark", "三😀\r\n", " ", "\x00",
    "{question}", "long " * 3000, *(f"document {number} " * (number % 9) for number in range(300)), "",
]  # fmt: skip
ROWS = [
    {"id": number, "text": text, "question": f"q{number}" if number % 3 else None, "answer": text}
    for number, text in enumerate(TEXTS)
]
TEMPLATE = "{{Q}}: {question}\n{answer}"


def write(
    path: Path, rows: Sequence[dict[str, Any]], kind: pa.DataType | None = None, **options: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        arrays = [pa.array(column, kind if name == "text" else None) for name, column in columns.items()]
        pq.write_table(pa.table(arrays, names=list(columns)), path, **options)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0) + "\n" for row in rows))
    return path


def build(path: Path, column: str, cache: Path, processes: int = 1) -> TokenCache:
    source = open_corpus("x", str(path), column)
    return tokenize_corpus(source, ByteTokenizer(), cache_folder=cache, progress=False, processes=processes)


def files_of(cache: TokenCache) -> tuple[bytes, bytes]:
    return (cache.folder / "tokens.bin").read_bytes(), (cache.folder / "offsets.bin").read_bytes()


def texts_of(path: Path, column: str = "text") -> list[str]:
    source = open_corpus("x", str(path), column)
    return [text for chunk in source.chunks() for text in chunk.texts(column)]


@pytest.mark.parametrize("column", ["text", TEMPLATE])
def test_parquet_and_json_lines_give_the_same_token_files(tmp_path: Path, column: str) -> None:
    parts = [ROWS[:5], ROWS[5:100], ROWS[100:]]
    for number, rows in enumerate(parts):
        write(tmp_path / "json" / f"{number}.jsonl", rows)
        write(tmp_path / "rows" / f"sub{number}" / "a.parquet", rows, row_group_size=40)
    expected = build(tmp_path / "json", column, tmp_path / "cache")
    with mock.patch.object(text_files, "CHUNK_BYTES", 700):
        found = build(tmp_path / "rows", column, tmp_path / "cache", processes=2)
    assert found.folder != expected.folder
    assert files_of(found) == files_of(expected)
    if column == "text":
        assert found.n_documents == sum(bool(text) for text in TEXTS)


def test_a_template_is_filled_and_its_nulls_are_empty(tmp_path: Path) -> None:
    rows = [
        {"id": 0, "question": "q", "answer": "{a}"},
        {"id": 1, "question": None, "answer": "a"},
        {"id": 2, "question": None, "answer": ""},
        {"id": 3, "question": "q", "answer": None},
    ]
    for name in ("a.parquet", "a.jsonl"):
        path = write(tmp_path / name, rows)
        assert texts_of(path, TEMPLATE) == ["{Q}: q\n{a}", "{Q}: \na", "{Q}: q\n"]
        assert texts_of(path, "{answer}") == ["{a}", "a"]
        assert texts_of(path, "{answer} {answer}") == ["{a} {a}", "a a"]


def test_the_name_of_a_column_wins_over_a_template(tmp_path: Path) -> None:
    rows = [{"id": 0, "{answer}": "literal", "answer": "filled", "a{b": "open"}]
    for name in ("a.parquet", "a.jsonl"):
        path = write(tmp_path / name, rows)
        assert texts_of(path, "{answer}") == ["literal"]
        assert texts_of(path, "a{b") == ["open"]
        assert texts_of(path, "{answer}!") == ["filled!"]


@pytest.mark.parametrize("column", ["content", "{question}\n{anwser}", "{question", "{}"])
def test_a_missing_column_is_seen_before_the_start(tmp_path: Path, column: str) -> None:
    for name in ("a.parquet", "a.jsonl"):
        path = write(tmp_path / name, ROWS[:3])
        start = time.perf_counter()
        problem = check_source("x", str(path), column)
        # Milliseconds (pyarrow is imported above); the bound is for a machine that is busy.
        assert time.perf_counter() - start < 0.5
        assert problem is not None and problem.key == "text_column" and problem.value == column
        assert "it has 'id', 'text', 'question', 'answer'" in problem.rule
        assert ("'anwser'" in problem.rule) == ("anwser" in column)


def test_the_template_is_part_of_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:5])
    folders = {
        build(path, column, tmp_path / "cache").folder for column in ("text", "{text}", "{text}!", "text")
    }
    assert len(folders) == 3


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_every_type_of_string_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:20], kind=kind)
    assert texts_of(path) == [text for text in TEXTS[:20] if text]


def test_a_column_of_nulls_and_an_empty_file_hold_no_document(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"id": 0, "text": None}], kind=pa.null())
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert texts_of(tmp_path) == []
    with pytest.raises(DataError, match="contains no text in its 2 files"):
        build(tmp_path, "text", tmp_path / "cache")


def test_a_column_that_holds_no_text_is_named_with_its_type(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:3])
    problem = check_source("x", str(path), "{id}: {text}")
    assert problem is not None and "a.parquet: column 'id' contains int64" in problem.rule
    path = write(tmp_path / "b.parquet", [{"text": b"bytes"}])
    problem = check_source("x", str(path))
    assert (
        problem is not None and "column 'text' contains binary" in problem.rule and "strings" in problem.fix
    )


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not parquet")
    problem = check_source("x", str(tmp_path / "a.parquet"))
    assert problem is not None and "a.parquet: cannot be read" in problem.rule and "repair" in problem.fix
    # A later file is looked at when it is its turn.
    write(tmp_path / "a.parquet", ROWS[:3])
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    rows = [{"text": "some text"}]
    path = write(tmp_path / "b.parquet", rows, write_page_checksum=True, **options)
    sound = path.read_bytes()
    for damaged in (
        sound[:-9],
        sound.replace(b"some text", b"same text", 1),
        sound[:4] + bytes(40) + sound[44:],
    ):
        path.write_bytes(damaged)
        assert check_source("x", str(tmp_path)) is None
        with pytest.raises(DataError, match=r"(?s)b.parquet: cannot be read.*\n  fix:"):
            texts_of(tmp_path)


def test_text_that_is_not_utf_8_is_found_with_its_rows(tmp_path: Path) -> None:
    odd = pa.array([b"fine", b"caf\xe9", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": odd}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet, in rows 0 to 2: a text is not UTF-8"):
        texts_of(tmp_path / "a.parquet")


def test_chunks_are_bounded_and_cover_the_file(tmp_path: Path) -> None:
    """Short documents first and long ones last, in one row group: means alone would not bound a chunk."""
    texts = ["x"] * 9000 + ["y" * 2000] * 900
    path = write(tmp_path / "a.parquet", [{"text": text, "other": "z" * 500} for text in texts])
    with mock.patch.object(text_files, "CHUNK_BYTES", 100_000):
        chunks = list(open_corpus("x", str(path)).chunks())
    assert [text for chunk in chunks for text in chunk.texts("text")] == texts
    assert sum(chunk.n_file_bytes for chunk in chunks) == path.stat().st_size
    # Text and its offsets (4 bytes and, aligned, a bit a row), and no column that is not asked for.
    assert max(len(chunk.data) for chunk in chunks) < 100_000 + 2000 + 5 * parquet.BATCH_ROWS + 1000


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(n_groups: int) -> int:
        path = tmp_path / f"{n_groups}.parquet"
        group = pa.table({"text": [str(number) + "word " * 1000 for number in range(2000)]})  # 10 MB
        with pq.ParquetWriter(path, group.schema, use_dictionary=False) as writer:
            for _ in range(n_groups):
                writer.write_table(group)
        program = (
            "import resource, sys; from toolkit.data.sources import open_corpus\n"
            "chunks = open_corpus('x', sys.argv[1]).chunks()\n"
            "n = sum(len(text) for chunk in chunks for text in chunk.texts('text'))\n"
            "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        words = [sys.executable, "-c", program, str(path)]
        n, kib = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        assert int(n) > n_groups * 10_000_000
        return int(kib) * 1024

    # 120 MB more of text; decoded row groups are 10 MB, of which the allocator may keep a few.
    assert peak(14) - peak(2) < 50_000_000


def test_conversations_are_decoded_as_few_at_a_time_as_texts_of_their_length(tmp_path: Path) -> None:
    """A list of messages is stored as columns of other names."""
    messages = [[{"role": "user", "content": f"{number} " * 500}] for number in range(400)]
    pq.write_table(pa.table({"messages": messages, "other": ["z" * 5000] * 400}), tmp_path / "a.parquet")
    with mock.patch.object(text_files, "CHUNK_BYTES", 100_000):
        decoded = [
            batch.num_rows for batch, _ in parquet._parquet_batches(tmp_path / "a.parquet", ("messages",))
        ]
    assert sum(decoded) == 400 and max(decoded) < 100


def _tool_rows(call: Any, tool: Any) -> list[dict[str, Any]]:
    """Two rows of one tool each, called with ``call(name)``, as ``tool(name)`` describes it."""
    return [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": call(name)}}]},
            ],
            "tools": [{"function": {"name": name, "parameters": tool(name)}}],
        }
        for name in "ab"
    ]


def _conversations(path: Path) -> list[Conversation]:
    shape = Shape("messages")
    chunks = open_corpus("x", str(path), shape=shape).chunks()
    return [shape.conversation(row, "here") for chunk in chunks for _, row in chunk.rows()]


def _as_rows(conversations: list[Conversation]) -> list[dict[str, Any]]:
    return [{"messages": found.messages, "tools": found.tools} for found in conversations]


def test_keys_of_other_rows_are_no_keys_of_a_row_in_parquet_or_in_json_lines_exported_from_it(
    tmp_path: Path,
) -> None:
    """In tools and the arguments of their calls, as trl's remove_none_values has it: items of lists stay."""
    rows = _tool_rows(lambda name: {name: 1}, lambda name: {name: {"enum": [name, None], "of": name}})
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.to_json(tmp_path / "a.jsonl")
    dataset.save_to_disk(tmp_path / "saved")
    exported = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert exported[0]["tools"][0]["function"]["parameters"]["b"] is None
    for name in ("a.parquet", "a.jsonl", "saved"):
        assert _as_rows(_conversations(tmp_path / name)) == rows


def test_a_null_that_is_meant_is_kept_in_tools_as_the_text_of_json(tmp_path: Path) -> None:
    rows = _tool_rows(lambda name: {name: 1}, lambda name: {name: {"default": None}})
    dropped = _tool_rows(lambda name: {name: 1}, lambda name: {name: {}})
    texts = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    for kept, expected in ((rows, dropped), (texts, rows)):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        pq.write_table(pa.Table.from_pylist(kept), tmp_path / "a.parquet")
        for name in ("a.parquet", "a.jsonl"):
            assert _as_rows(_conversations(tmp_path / name)) == expected


def _row_types(arguments: pa.DataType, parameters: pa.DataType) -> pa.Schema:
    def function(name: str, kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.struct({"function": pa.struct({"name": pa.string(), name: kind})}))

    message = {"role": pa.string(), "content": pa.string(), "tool_calls": function("arguments", arguments)}
    tools = function("parameters", parameters)
    return pa.schema({"messages": pa.list_(pa.struct(message)), "tools": tools})


def test_a_map_is_an_object_wherever_it_stands(tmp_path: Path) -> None:
    """As Spark writes tools and arguments, nested too; datasets cannot read it."""
    strings = pa.map_(pa.string(), pa.string())
    kinds = strings, pa.map_(pa.string(), pa.struct({"of": pa.list_(strings)}))
    rows = _tool_rows(lambda name: {"city": name}, lambda name: {name: {"of": [{"type": name}, {}]}})
    table = pa.Table.from_pylist(rows, schema=_row_types(*kinds))
    pq.write_table(table, tmp_path / "a.parquet")
    assert _as_rows(_conversations(tmp_path / "a.parquet")) == rows
    messages = pa.array([[{"role": "user", "content": "q"}]], pa.list_(strings))
    pq.write_table(pa.table({"messages": messages}), tmp_path / "b.parquet")
    assert _conversations(tmp_path / "b.parquet")[0].messages == [{"role": "user", "content": "q"}]
    twice = pa.array([[[("role", "user"), ("role", "tool")]]], pa.list_(strings))
    pq.write_table(pa.table({"messages": twice}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c.parquet, in rows 0 to 0: a map has the key 'role' twice\n  fix:"):
        _conversations(tmp_path / "c.parquet")


def test_a_value_of_the_type_json_is_what_it_says(tmp_path: Path) -> None:
    """As datasets 4.7 and later write keys whose values are of several types."""
    rows = _tool_rows(lambda name: {name: [1, name]}, lambda name: {name: {"enum": ["a", 1, None]}})
    features = datasets.Features.from_arrow_schema(_row_types(pa.json_(), pa.json_()))
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        assert _as_rows(_conversations(tmp_path / name)) == rows
    pq.write_table(pa.table({"messages": pa.array(["[{"], pa.json_())}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, in rows 0 to 0: .*\n  fix:"):
        _conversations(tmp_path / "b.parquet")


def test_rows_that_python_has_no_values_for_are_told_with_their_file(tmp_path: Path) -> None:
    message = {"role": "user", "content": "q"}
    years = pa.array(
        [[message | {"day": 10**7}]],
        pa.list_(pa.struct({**dict.fromkeys(message, pa.string()), "day": pa.date32()})),
    )
    for messages, said in (
        ([years], "in rows 0 to 0: .* out of range"),
        ([pa.array([[message]])] * 2, "there are several columns 'messages'"),
    ):
        table = pa.table(messages, names=["messages"] * len(messages))
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=rf"a.parquet(,|:) {said}\n  fix:"):
            _conversations(tmp_path / "a.parquet")


def test_the_text_of_files_is_estimated_by_their_metadata(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " * 500, "other": "z" * 5000} for number in range(400)]
    size = sum(len(row["text"]) for row in rows)
    for number in range(parquet.SAMPLED_FILES + 3):
        write(tmp_path / f"{number:02}.parquet", rows, compression="zstd")
    source = open_corpus("x", str(tmp_path))
    assert source.n_bytes < size
    # Lengths and page headers come on top of the text.
    assert source.n_text_bytes == pytest.approx(size * (parquet.SAMPLED_FILES + 3), rel=0.02)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:3])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = check_source("x", str(path))
    assert problem is not None and problem.key == "dataset_path"
    assert "pyarrow" in problem.rule and "'.[hf]'" in problem.fix


def test_pyarrow_is_imported_for_parquet_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ROWS[:3])
    write(tmp_path / "b.jsonl", ROWS[:3])
    program = (
        "import sys; from toolkit.data.sources import open_corpus\n"
        "open_corpus('x', 'b.jsonl'); assert 'pyarrow' not in sys.modules\n"
        "open_corpus('x', 'a.parquet'); assert not {'torch', 'datasets', 'pandas'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}); {program}"],
        cwd=tmp_path,
        check=True,
    )


def test_a_folder_may_hold_every_kind_of_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:2])
    write(tmp_path / "b.parquet", ROWS[3:5])
    (tmp_path / "c.txt").write_text("plain")
    assert texts_of(tmp_path) == [TEXTS[0], TEXTS[3], TEXTS[4], "plain"]
    cache = build(tmp_path, "text", tmp_path / "cache")
    assert cache.n_documents == 4 and np.all(cache.tokens[cache.offsets[:-1]] == 256)
