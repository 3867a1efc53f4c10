"""Rules for the model, its tokenizer and its precision."""

from __future__ import annotations

import os
from collections.abc import Iterator

from toolkit.errors import DataError, Problem, join_or
from toolkit.models.from_config import architecture_key, config_folder
from toolkit.models.registry import families, spec
from toolkit.preflight.planned_run import PlannedRun, rule

CHANGEABLE = {"norm_eps": "norm_eps", "rope_theta": "rope_theta", "rope_scaling": "rope_scaling_factor"}
"""Fields that do not affect shapes, and the model.* keys that may change them deliberately."""


@rule()
def model_exists(run: PlannedRun) -> list[Problem]:
    """Check that the preset exists and that its overrides are consistent."""
    if not run.model_problems:
        return []
    from toolkit.preflight.hub import published

    match = published(run.config.model.name or "")
    if match is None:
        return [run.located(problem) for problem in run.model_problems]
    hub, meant = match
    name, flavor = hub.published[meant]
    return [
        run.problem(
            "model.name",
            "is a repository id; model.name is a family and model.flavor a size",
            f'did you mean {meant}? If so, set model.name = "{name}" and model.flavor = "{flavor}"',
        )
    ]


@rule(DataError)
def architecture_readable(run: PlannedRun) -> list[Problem]:
    """Check that config.json describes a supported model, if nothing else selects the model."""
    if not run.architecture_error or run.start.weights == config_folder(run.config):
        return []  # another rule reports more about the weights folder
    fix = (
        f"{name_readable()}; to use only its tokenizer, set model.name and model.flavor, which override "
        "config.json"
    )
    return [run.problem(architecture_key(run.config), run.architecture_error, fix)]


def name_readable() -> str:
    """Return the fix for a config.json of an unsupported model."""
    return f"use the folder of {join_or(spec(family).hf_config().display_name for family in families())}"


@rule()
def classifier_configured(run: PlannedRun) -> list[Problem]:
    """Check that a config.json of a classifier comes with labeled data."""
    if run.model is None or run.model.classifier is None or run.config.finetune.classes:
        return []
    labels = run.model.classifier.labels
    rule = f"the model of {run.model_label} is a classifier of {len(labels)} classes"
    fix = f"set finetune.classification.num_labels = {len(labels)}, or use a language model"
    return [run.problem(architecture_key(run.config), rule, fix)]


@rule(DataError)
def tokenizer_readable(run: PlannedRun) -> list[Problem]:
    """Check that the configured path contains a tokenizer."""
    if not run.tokenizer_error:
        return []
    key = "model.tokenizer_path" if run.config.model.tokenizer_path else "model.hf_assets_path"
    from toolkit.preflight.hub import download_line

    download = None if os.path.exists(run.tokenizer_path) else download_line(run.tokenizer_path)
    rule, _, fix = run.tokenizer_error.partition("\n  fix:  ")
    fix = download or fix or "use a folder with tokenizer.model or tokenizer.json"
    return [run.problem(key, rule, fix)]


@rule()
def vocabulary_fits(run: PlannedRun) -> Iterator[Problem]:
    """Check that the embedding has a row for each token."""
    if run.model is None or run.vocabulary is None or run.vocabulary <= run.model.vocab_size:
        return
    model, added = run.config.model, "model.additional_special_tokens"
    tokenizer = "model.tokenizer_path" if model.tokenizer_path else "model.hf_assets_path"
    yield run.problem(
        "model.vocab_size" if model.vocab_size else architecture_key(run.config),
        f"the tokenizer in {run.tokenizer_path} has {run.vocabulary} tokens, the model "
        f"({run.model_label}) {run.model.vocab_size}",
        f"set model.vocab_size = {run.vocabulary}, or {tokenizer} to this model's tokenizer",
        "model.name",
        tokenizer,
        added,
    )


@rule()
def sequence_fits_model(run: PlannedRun) -> Iterator[Problem]:
    """Check that sequences do not exceed the model's maximum length."""
    if run.model is None:
        return
    limit = run.model.max_seq_len
    keys = ["training.seq_len"] + (["validation.seq_len"] if run.config.validation.enable else [])
    for key in keys:
        if run.config.value(key) > limit:
            rule = f"{run.model_label} supports at most {limit} tokens"
            fix = f"set {key} to at most {limit}, or raise model.max_seq_len"
            others = ("model.max_seq_len", architecture_key(run.config), "model.name")
            yield run.problem(key, rule, fix, *others)


@rule()
def device_has_dtype(run: PlannedRun) -> Iterator[Problem]:
    """Check for bfloat16 support, which GPUs before Ampere lack. (CPUs may emulate it slowly.)"""
    if run.hardware.device == "cpu" or run.hardware.native_bf16:
        return
    for key in ("training.dtype", "training.mixed_precision_param"):
        if run.config.value(key) == "bfloat16":
            fix = 'set it to "float32"' if key == "training.dtype" else 'set it to "float32", or to "auto"'
            yield run.problem(key, f"{run.hardware.name} does not support bfloat16", fix)
