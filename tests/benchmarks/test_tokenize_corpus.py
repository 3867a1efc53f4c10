"""The benchmark of tokenizing: other tokens than this toolkit's are rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import tokenize_corpus
from benchmarks.tokenize_corpus import NotComparable, refuse_other_tokens

ROOT = Path(__file__).parents[2]


def test_other_tokens_are_refused_with_side_and_document() -> None:
    hashes = tokenize_corpus.fingerprints([[1, 2], np.array([3], np.uint16)])
    ours = {"documents": 2, "tokens": 3, "first": hashes}
    refuse_other_tokens("datasets", ours, ours)
    other = tokenize_corpus.fingerprints([[1, 2], [4]])
    for change, message in (
        ({"documents": 3}, "datasets: 3 documents, this toolkit 2"),
        ({"tokens": 2}, "datasets: 2 tokens, this toolkit 3"),
        ({"first": other}, r"datasets: document 1 \(from 0\)"),
    ):
        with pytest.raises(NotComparable, match=message):
            refuse_other_tokens("datasets", ours | change, ours)


def test_datasets_makes_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through both programs; BOS and EOS are those of the toolkit."""
    pytest.importorskip("datasets")
    monkeypatch.setattr(tokenize_corpus, "TURNS", 1)
    corpus = tmp_path / "corpus.jsonl"
    tokenize_corpus.write_corpus(corpus, 40_000)
    runs = tokenize_corpus.beside(corpus, ROOT / "tests/assets/tokenizer", tmp_path)
    assert list(runs) == ["this toolkit", "this toolkit, tokenizer.json", "datasets"]
    assert all(len(run["first"]) == run["documents"] > 5 for [run] in runs.values())
    rows = list(tokenize_corpus.beside_lines("shipped", runs))
    assert [row.split(" | ")[1] for row in rows] == list(runs)
