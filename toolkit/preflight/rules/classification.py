"""Rules for a classification head and its data."""

from __future__ import annotations

from collections import Counter

from toolkit.data.build import corpora
from toolkit.data.run_data import BASE_CORPUS
from toolkit.errors import Problem
from toolkit.models.registry import spec
from toolkit.preflight.planned_run import PlannedRun, note, rule

_TABLE = "finetune.classification"


@rule()
def classes_valid(run: PlannedRun) -> list[Problem]:
    """Check that there are at least two classes with unique names."""
    options = run.config.finetune.classification
    count, names = options.num_labels, options.label_names
    if count == 1:
        rule = "a classifier has at least two classes"
        fix = 'set it to at least 2, or remove it; finetune.objective = "reward" trains one score'
        return [run.problem(f"{_TABLE}.num_labels", rule, fix)]
    if not count or not names:
        return []
    if len(names) != count:
        rule = f"has {len(names)} names, but {_TABLE}.num_labels is {count}"
        return [run.problem(f"{_TABLE}.label_names", rule, "list each class once, in order")]
    doubled = next((name for name, times in Counter(names).items() if times > 1 or not name), None)
    if doubled is None:
        return []
    rule = f"{doubled!r} is not unique" if doubled else "contains an empty name"
    return [run.problem(f"{_TABLE}.label_names", rule, "list each class once, in order")]


@rule()
def classifier_has_a_class(run: PlannedRun) -> list[Problem]:
    """Check that transformers has the model with a classification head."""
    options = run.config.finetune
    if not options.classes or run.model is None:
        return []
    form = spec(run.model.family).hf_config()
    if form.classifies:
        return []
    rule = f"transformers has no {form.classifier}, which could read the trained model"
    if options.objective == "reward":
        return [run.problem("finetune.objective", rule, "use another model", "model.name")]
    return [run.problem(f"{_TABLE}.num_labels", rule, "set it to 0, or use another model", "model.name")]


@rule()
def classifier_reads_labels(run: PlannedRun) -> list[Problem]:
    """Check that a classifier's corpora have rows of text and label."""
    if not run.config.finetune.classification.num_labels:
        return []
    rule = "a classifier needs rows with a text and a label"
    keys = {corpus.format_key for corpus in corpora(run.config) if corpus.format != "text"}
    fix = f"remove it, or set {_TABLE}.num_labels = 0"
    return [run.problem(key, rule, fix) for key in sorted(keys)]


@rule()
def classifier_has_no_vocabulary_head(run: PlannedRun) -> list[Problem]:
    """Check that no option of the LM head is set."""
    if not run.config.finetune.classes:
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
            "has no next-token probabilities",
        )
        for name in ("dataset", "dataset_path")
    }
    return [
        run.problem(key, f"a classifier or reward model {why}", "remove it")
        for key, (set_, why) in asked.items()
        if set_
    ]


@rule()
def hugging_face_has_no_hidden_layers(run: PlannedRun) -> list[Problem]:
    """Check that transformers can read an exported folder."""
    options, sizes = run.config.checkpoint, run.config.finetune.classification.hidden_sizes
    if not sizes or not (options.last_save_in_hf or options.hf_export_interval is not None):
        return []
    key = "checkpoint.last_save_in_hf" if options.last_save_in_hf else "checkpoint.hf_export_interval"
    rule = "Hugging Face's classifiers have no hidden layers before the scores"
    return [run.problem(f"{_TABLE}.hidden_sizes", rule, f"remove it, or {key}")]


@note
def classification_notes(run: PlannedRun) -> list[str]:
    """Note that, without a document mask, texts in the same row attend to each other."""
    data = run.config.data
    if not run.config.finetune.classification.num_labels or data.document_mask or not data.packing:
        return []
    return [
        "data.document_mask = false: each text attends to those before it in its row, which affects its class"
    ]
