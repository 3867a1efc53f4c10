"""Rules about a classifier's head and its data."""

from __future__ import annotations

from collections import Counter

from toolkit.data.build import corpora
from toolkit.data.run_data import BASE_CORPUS
from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule

_TABLE = "finetune.classification"


@rule()
def classes_fit(run: PlannedRun) -> list[Problem]:
    """There are two classes or more, each of a name of its own."""
    options = run.config.finetune.classification
    count, names = options.num_labels, options.label_names
    if count == 1:
        rule = "a classifier has two classes or more"
        return [run.problem(f"{_TABLE}.num_labels", rule, "set it to at least 2, or leave it out")]
    if not count or not names:
        return []
    if len(names) != count:
        rule = f"names {len(names)} classes, and {_TABLE}.num_labels is {count}"
        return [run.problem(f"{_TABLE}.label_names", rule, "name each class once, in order")]
    doubled = next((name for name, times in Counter(names).items() if times > 1 or not name), None)
    if doubled is None:
        return []
    rule = f"{doubled!r} is the name of no single class"
    return [run.problem(f"{_TABLE}.label_names", rule, "name each class once, in order")]


@rule()
def classifier_reads_labels(run: PlannedRun) -> list[Problem]:
    """A classifier reads rows of a text and a label."""
    if not run.config.finetune.classification.num_labels:
        return []
    rule = "a classifier is trained on rows of a text and a label"
    keys = {corpus.format_key for corpus in corpora(run.config) if corpus.format != "text"}
    fix = f"remove it, or set {_TABLE}.num_labels = 0"
    return [run.problem(key, rule, fix) for key in sorted(keys)]


@rule()
def classifier_has_no_vocabulary_head(run: PlannedRun) -> list[Problem]:
    """Options of the vocabulary's head are set in vain."""
    if not run.config.finetune.classification.num_labels:
        return []
    asked = {
        "model.tie_embeddings": (run.config.model.tie_embeddings is True, "has no head to tie"),
        "parallelism.disable_loss_parallel": (
            run.config.parallelism.disable_loss_parallel,
            "has scores that tensor parallelism does not split",
        ),
    }
    asked |= {
        f"{BASE_CORPUS}.{name}": (
            run.config.validation.enable and getattr(run.config.validation.base_corpus, name) is not None,
            "gives no next token a probability",
        )
        for name in ("dataset", "dataset_path")
    }
    return [
        run.problem(key, f"a classifier {why}", "leave it out") for key, (set_, why) in asked.items() if set_
    ]


@rule()
def hugging_face_has_no_hidden_layers(run: PlannedRun) -> list[Problem]:
    """A folder is written that transformers reads."""
    options, sizes = run.config.checkpoint, run.config.finetune.classification.hidden_sizes
    if not sizes or not (options.last_save_in_hf or options.hf_export_interval is not None):
        return []
    key = "checkpoint.last_save_in_hf" if options.last_save_in_hf else "checkpoint.hf_export_interval"
    rule = "the classifiers of Hugging Face have no hidden layers before the scores"
    return [run.problem(f"{_TABLE}.hidden_sizes", rule, f"leave it out, or {key}")]


@note
def classification_notes(run: PlannedRun) -> list[str]:
    """Texts of a row see one another without a document mask."""
    data = run.config.data
    if not run.config.finetune.classification.num_labels or data.document_mask or not data.packing:
        return []
    return ["data.document_mask = false: a text of a row sees those before it, and so does its class"]
