"""Rows of a corpus: which token predicts which, where documents and positions begin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.packing import PADDING, PackedRows, PaddedRows, corpus_rows
from toolkit.errors import DataError
from toolkit.loss import IGNORED_LABEL

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
PAD = 9999


def _corpus(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are their own place in the corpus."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return np.arange(offsets[-1], dtype=np.uint16), offsets


@given(lengths=LENGTHS, seq_len=st.integers(1, 15))
def test_packed_rows_predict_every_token_once(lengths: list[int], seq_len: int) -> None:
    tokens, offsets = _corpus(lengths)
    rows = PackedRows(tokens, offsets, seq_len, document_mask=False)
    samples = [rows.sample(k) for k in range(len(rows))]
    predicted = [int(label) for sample in samples for label in sample["labels"]]
    assert predicted == list(range(1, len(rows) * seq_len + 1))
    assert len(tokens) - 1 - len(predicted) < seq_len  # the tail is shorter than a row
    for sample in samples:
        assert set(sample) == {"tokens", "labels"}
        assert np.array_equal(sample["tokens"] + 1, sample["labels"])
        assert sample["tokens"].dtype == sample["labels"].dtype == np.int64


@given(lengths=LENGTHS, seq_len=st.integers(1, 15))
def test_packed_rows_with_a_document_mask(lengths: list[int], seq_len: int) -> None:
    tokens, offsets = _corpus(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = PackedRows(tokens, offsets, seq_len)
    for k in range(len(rows)):
        sample = rows.sample(k)
        assert [sample[name].dtype for name in ("positions", "documents")] == [np.int64, np.int32]
        place = sample["tokens"]
        for t in range(seq_len):
            ends = owner[place[t]] != owner[place[t] + 1]
            assert sample["labels"][t] == (IGNORED_LABEL if ends else place[t] + 1)
            # A position counts from the document's start, or from the row's where that is later.
            assert sample["positions"][t] == min(t, place[t] - offsets[owner[place[t]]])
            assert sample["documents"][t] == owner[place[t]] - owner[place[0]]


@given(lengths=LENGTHS, seq_len=st.integers(1, 15), document_mask=st.booleans())
def test_padded_rows_are_one_document_each(lengths: list[int], seq_len: int, document_mask: bool) -> None:
    tokens, offsets = _corpus(lengths)
    rows = PaddedRows(tokens, offsets, seq_len, document_mask=document_mask, pad_id=PAD)
    assert len(rows) == len(lengths)
    for k, length in enumerate(lengths):
        sample = rows.sample(k)
        document = list(range(offsets[k], offsets[k + 1]))
        n = min(length, seq_len)
        assert sample["tokens"].tolist() == document[:n] + [PAD] * (seq_len - n)
        labels = document[1 : seq_len + 1]
        assert sample["labels"].tolist() == labels + [IGNORED_LABEL] * (seq_len - len(labels))
        if document_mask:
            assert sample["positions"].tolist() == list(range(n)) + [0] * (seq_len - n)
            assert sample["documents"].tolist() == [0] * n + [PADDING] * (seq_len - n)
        else:
            assert set(sample) == {"tokens", "labels"}


def test_a_blank_row_has_nothing_to_predict() -> None:
    tokens, offsets = _corpus([5])
    blank = PackedRows(tokens, offsets, 4, pad_id=PAD).blank()
    assert {name: set(values.tolist()) for name, values in blank.items()} == {
        "tokens": {PAD}, "labels": {IGNORED_LABEL}, "positions": {0}, "documents": {PADDING},
    }  # fmt: skip
    sample = PackedRows(tokens, offsets, 4).sample(0)
    assert {name: v.dtype for name, v in blank.items()} == {name: v.dtype for name, v in sample.items()}


def test_rows_do_not_change_the_corpus_or_each_other() -> None:
    tokens, offsets = _corpus([3, 3, 3])
    rows = PackedRows(tokens, offsets, 4)
    first = rows.sample(0)
    for values in first.values():
        values[:] = 7
    assert np.array_equal(tokens, np.arange(9))
    assert rows.sample(0)["tokens"].tolist() == [0, 1, 2, 3]


def test_a_corpus_shorter_than_a_sample_is_refused_with_numbers() -> None:
    tokens, offsets = _corpus([5, 5])
    options = {"document_mask": True, "pad_id": 0}
    assert len(corpus_rows(tokens, offsets, 9, packing=True, **options)) == 1
    with pytest.raises(DataError, match=r"10 tokens in 2 documents.*seq_len 10 needs 11"):
        corpus_rows(tokens, offsets, 10, packing=True, **options)
    assert len(corpus_rows(tokens, offsets, 10, packing=False, **options)) == 2
