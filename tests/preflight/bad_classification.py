"""Runs that break the rules of ``rules.classification``, and what others say of a classifier."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.preflight.bad_runs import TOKENIZER, bad
from toolkit.models.common.args import Classifier
from toolkit.models.registry import resolve, spec


def _row(**row: Any):  # type: ignore[no-untyped-def]
    def prepare(folder: Path) -> None:
        (folder / "a.jsonl").write_text(json.dumps(row) + "\n")

    return prepare


def _classifier(folder: Path) -> None:
    shutil.copytree(TOKENIZER, folder / "model")
    shape = replace(resolve("llama3", "debugmodel", tokenizer_vocab=4352), classifier=Classifier(("a", "b")))
    config = spec("llama").hf_config().write(shape, dtype="float32", bos=None, eos=None, pad=None)
    (folder / "model/config.json").write_text(json.dumps(config))


_PREFIX = "finetune.classification"
LABELS = f"{_PREFIX}.num_labels=2 training.dataset_path=a.jsonl"
GOOD = _row(text="hello", label=1)

CASES = [
    bad(
        "classes_valid",
        f"{_PREFIX}.num_labels=1",
        "at least two classes",
        prepare=GOOD,
        also="corpus_readable",
    ),
    bad(
        "classes_valid",
        f"{_PREFIX}.label_names=a,b,c {LABELS}",
        f"has 3 names, but {_PREFIX}.num_labels is 2",
        prepare=GOOD,
    ),
    bad("classes_valid", f"{_PREFIX}.label_names=a,a {LABELS}", "'a' is not unique", prepare=GOOD),
    bad(
        "classifier_has_a_class",
        f"{LABELS} model.name=llama4",
        "transformers has no Llama4ForSequenceClassification",
        "set it to 0, or use another model",
        prepare=GOOD,
    ),
    bad(
        "classifier_reads_labels",
        f"data.format=messages {LABELS}",
        "rows with a text and a label",
        prepare=_row(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
    ),
    bad(
        "classifier_has_no_vocabulary_head",
        f"validation.base_corpus.dataset=embedded validation.enable validation.dataset_path=a.jsonl {LABELS}"
        " validation.seq_len=256",
        "no next-token",
        prepare=GOOD,
    ),
    bad(
        "classifier_has_no_vocabulary_head",
        f"model.tie_embeddings=true {LABELS}",
        "no head to tie",
        prepare=GOOD,
    ),
    bad(
        "classifier_has_no_vocabulary_head",
        f"parallelism.disable_loss_parallel=true parallelism.tensor_parallel_degree=2 {LABELS}",
        "tensor parallelism does not split",
        world=2,
        prepare=GOOD,
    ),
    bad(
        "hugging_face_has_no_hidden_layers",
        f"{_PREFIX}.hidden_sizes=[8] checkpoint.enable=true checkpoint.last_save_in_hf=true {LABELS}",
        "have no hidden layers",
        "remove it, or checkpoint.last_save_in_hf",
        prepare=GOOD,
    ),
    bad(
        "adapter_exportable",
        f"checkpoint.last_save_in_hf=true checkpoint.enable=true finetune.adapter=prefix_tuning {LABELS}",
        "a classification head is trained too",
        prepare=GOOD,
    ),
    bad(
        "options_act",
        f"{_PREFIX}.hidden_sizes=[8]",
        "num_labels = 0",
        "set finetune.classification.num_labels above 1",
    ),
    bad(
        "corpus_readable",
        LABELS,
        "no column 'label'",
        "set finetune.classification.label_column",
        key="training.dataset_path",
        prepare=_row(text="hello", stars=1),
    ),
    bad(
        "corpus_readable",
        LABELS,
        "a.jsonl, line 1: column 'label' contains 2, which is not one of the 2 classes",
        "a number from 0 to 1",
        key="training.dataset_path",
        prepare=_row(text="hello", label=2),
    ),
    bad(
        "corpus_readable",
        f"{LABELS} {_PREFIX}.label_names=good,bad",
        "which is not one of the 2 classes",
        "did you mean good?",
        key="training.dataset_path",
        prepare=_row(text="hello", label="goood"),
    ),
    bad(
        "corpus_readable",
        LABELS,
        "has no text",
        "remove the row",
        key="training.dataset_path",
        prepare=_row(text="", label=1),
    ),
    bad(
        "classifier_configured",
        "model.hf_assets_path=model",
        "is a classifier of 2 classes",
        "set finetune.classification.num_labels = 2",
        prepare=_classifier,
    ),
    bad(
        "patterns_match",
        f"finetune.trainable=score.* {LABELS}",
        '"score.*" matches no parameter',
        prepare=GOOD,
    ),
]
