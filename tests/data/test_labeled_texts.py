"""Texts with a class: from JSON lines or Parquet, by number or name, into rows whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.byte_tokenizer import ByteTokenizer
from toolkit.data.labeled_rows import LabeledRows
from toolkit.data.labeled_texts import LabeledTexts
from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL

NAMES = ("1", "0", "good")
ROWS = [("aa", 0), ("bbbbbbb", 2), ("c", "good"), ("dddd", "0"), ("eeeeeeeeeeee", "1"), ("ff", 1)]
CLASSES = [0, 2, 2, 1, 0, 1]
"""A name goes before a number: "0" is the second class."""


def _cache(file: Path) -> TokenCache:
    shape = LabeledTexts("text", "label", NAMES)
    source = open_corpus("", str(file), shape=shape)
    return tokenize_corpus(source, ByteTokenizer(), cache_folder=file.parent / "cache", progress=False)  # type: ignore[arg-type]


def _jsonl(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS))
    return file


def test_texts_have_bos_no_eos_and_their_class(tmp_path: Path) -> None:
    cache = _cache(_jsonl(tmp_path))
    assert cache.labels is not None and cache.labels.tolist() == CLASSES
    texts = [
        cache.tokens[begin:end].tolist() for begin, end in zip(cache.offsets, cache.offsets[1:], strict=False)
    ]
    assert texts == [[256, *text.encode()] for text, _ in ROWS]


def test_parquet_is_read_as_json_lines_are(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": [text for text, _ in ROWS], "label": CLASSES}), file)
    lines, rows = _cache(_jsonl(tmp_path)), _cache(file)
    assert rows.labels is not None and rows.labels.tolist() == CLASSES
    assert np.array_equal(rows.tokens, lines.tokens) and np.array_equal(rows.offsets, lines.offsets)


@pytest.mark.parametrize("packing", [True, False])
def test_each_text_is_in_one_row_with_its_class_at_its_end(tmp_path: Path, packing: bool) -> None:
    rows = LabeledRows(_cache(_jsonl(tmp_path)), 8, packing=packing)
    found = []
    for k in range(len(rows)):
        row = rows.sample(k)
        for number in range(row["documents"].max() + 1):
            here = row["documents"] == number
            labels = row["labels"][here]
            assert (labels[:-1] == IGNORED_LABEL).all()
            assert row["positions"][here].tolist() == list(range(here.sum()))
            found.append((bytes(row["tokens"][here][1:].astype(np.uint8)).decode(), int(labels[-1])))
        assert (row["labels"][row["documents"] < 0] == IGNORED_LABEL).all()
    cut = [(text[:7], label) for (text, _), label in zip(ROWS, CLASSES, strict=True)]
    assert sorted(found) == sorted(cut)
    assert len(rows) == (4 if packing else 6)
    assert "6 texts, by class 2, 2, 2; 1 truncated" in rows.describe()


def test_a_bad_row_is_named_by_line(tmp_path: Path) -> None:
    file = _jsonl(tmp_path)
    file.write_text(file.read_text() + '{"text": "g", "label": 3}\n')
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 7: column 'label' contains 3, which is not one of the 3"
    ):
        _cache(file)


@pytest.mark.parametrize(
    ("label", "fix"), [("1.0", r"a number from 0 to 2 \(as 1, not 1.0\)"), ('"2"', "without quotes")]
)
def test_a_number_that_is_written_otherwise_is_told_how(tmp_path: Path, label: str, fix: str) -> None:
    file = _jsonl(tmp_path)
    file.write_text(file.read_text() + f'{{"text": "g", "label": {label}}}\n')
    with pytest.raises(DataError, match=fix):
        _cache(file)
