"""Runs that break the rules of ``rules.data`` and ``rules.corpora``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.preflight.bad_runs import bad

CODE, BASE = "data.mixture.code", "validation.base_corpus"
VALIDATED = "validation.enable validation.dataset=embedded_validation validation.seq_len=256"


def _parquet(folder: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["text"]}), folder / "a.parquet")


def _saved(folder: Path) -> None:
    """Write as save_to_disk does a DatasetDict with one split, as far as it is looked at before a run."""
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


def _large(folder: Path) -> None:
    """Sparse: 3 GB of nothing."""
    with open(folder / "a.txt", "w") as file:
        os.truncate(file.fileno(), 3_000_000_000)


CASES = [
    bad("corpus_readable", "training.dataset=wikitext", "Hugging Face Hub", "Salesforce/wikitext"),
    bad("corpus_readable", "training.dataset=a/b/c", "a name of the form owner/name"),
    bad(
        "corpus_readable",
        "training.dataset=a/b",
        "dataset_path",
        prepare=lambda at: (at / "a/b").mkdir(parents=True),
    ),
    bad(
        "corpus_readable",
        "training.dataset_path=a.parquet",
        "it has 'id', 'body'",
        prepare=_parquet,
    ),
    bad(
        "corpus_readable",
        "data.text_column={title}:{body} training.dataset_path=a.parquet",
        "no column 'title'; it has 'id', 'body'",
        prepare=_parquet,
    ),
    bad(
        "corpus_readable",
        f"{CODE}.dataset_path=a.parquet {CODE}.text_column=id",
        "column 'id' contains int64",
        prepare=_parquet,
    ),
    bad(
        "corpus_readable",
        "training.dataset_path=a.parquet",
        "cannot be read",
        prepare=lambda folder: (folder / "a.parquet").write_text("not parquet"),
    ),
    bad(
        "corpus_readable",
        "validation.dataset_path=saved validation.enable validation.seq_len=256",
        "no such split",
        "it has train",
        prepare=_saved,
    ),
    bad(
        "template_has_no_escapes",
        r"data.text_column={id}\n{body} training.dataset_path=a.jsonl",
        "as two characters",
        "$'{a}",
        prepare=lambda folder: (folder / "a.jsonl").write_text('{"id": "1", "body": "text"}\n'),
    ),
    bad("text_column_acts", "data.text_column=body", "has columns"),
    bad(
        "text_column_acts",
        f"{CODE}.text_column=body {CODE}.dataset_path=a.txt",
        "has columns",
        prepare=lambda folder: (folder / "a.txt").write_text("text"),
    ),
    bad("dataset_choices_act", "training.dataset_split=test", "'embedded' has no split to select"),
    bad("dataset_choices_act", f"{CODE}.dataset_subset=en", "'c4_test' has no subset to select"),
    bad(
        "dataset_choices_act",
        "training.dataset_split=test training.dataset_path=a.txt",
        "'a.txt' has no split",
        prepare=lambda folder: (folder / "a.txt").write_text("text"),
    ),
    bad(
        "corpus_readable",
        f"{BASE}.dataset_path=gone.txt {VALIDATED}",
        "gone.txt",
        prepare=lambda folder: (folder / "a.txt").write_text("text"),
    ),
    bad("corpus_readable", f"{BASE}.dataset=wikitext {VALIDATED}", "Hugging Face Hub"),
    bad("options_act", f"{BASE}.dataset_subset=en {VALIDATED}", "has no effect without a base corpus"),
    bad("dataset_choices_act", f"{BASE}.dataset_split=test {BASE}.dataset=embedded {VALIDATED}", "no split"),
    bad("options_act", f"{BASE}.dataset=embedded", "with validation.enable = false"),
    bad(
        "corpus_small_enough",
        "data.max_inline_gb=2.5 training.dataset_path=a.txt",
        "about 3 GB of text",
        "at most 2.5 GB",
        "run `llama-toolkit prepare-data --",
        "--training.dataset_path=a.txt",
        prepare=_large,
    ),
]
