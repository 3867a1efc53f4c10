"""Rules about the model, its tokenizer and the precision."""

from __future__ import annotations

import os

from toolkit.errors import DataError, Problem, join_or
from toolkit.models.from_config import architecture_key, config_folder
from toolkit.models.registry import families, spec
from toolkit.preflight.planned_run import PlannedRun, rule

CHANGEABLE = {"norm_eps": "norm_eps", "rope_theta": "rope_theta", "rope_scaling": "rope_scaling_factor"}
"""Fields that change no shape, and the keys of model.* by which a user may change them on purpose."""


@rule()
def model_exists(run: PlannedRun) -> list[Problem]:
    """The preset exists, and its changed fields go together."""
    if not run.model_problems:
        return []
    from toolkit.preflight.hub import published

    found = published(run.config.model.name or "")
    if found is None:
        return [run.located(problem) for problem in run.model_problems]
    hub, meant = found
    name, flavor = hub.published[meant]
    return [
        run.problem(
            "model.name",
            "is the id of a repository; model.name is a family and model.flavor a size",
            f'did you mean {meant}? Then set model.name = "{name}" and model.flavor = "{flavor}"',
        )
    ]


@rule(DataError)
def architecture_readable(run: PlannedRun) -> list[Problem]:
    """config.json says what the model is, where nothing else does."""
    if not run.architecture_error or run.start.weights == config_folder(run.config):
        return []  # of the folder of the weights another rule says more
    fix = (
        f"{name_readable()}; where only its tokenizer is wanted, set model.name and model.flavor, which go "
        "before config.json"
    )
    return [run.problem(architecture_key(run.config), run.architecture_error, fix)]


def name_readable() -> str:
    """Advise what to do where a config.json is of no model that can be read."""
    return f"name the folder of {join_or(spec(family).hf_config().display_name for family in families())}"


@rule()
def model_has_a_vocabulary(run: PlannedRun) -> list[Problem]:
    """A config.json of a classifier needs its data."""
    if run.model is None or run.model.classifier is None or run.config.finetune.classification.num_labels:
        return []
    labels = run.model.classifier.labels
    rule = f"the model of {run.model_label} is a classifier of {len(labels)} classes"
    fix = f"set finetune.classification.num_labels = {len(labels)}, or name a language model"
    return [run.problem(architecture_key(run.config), rule, fix)]


@rule(DataError)
def tokenizer_readable(run: PlannedRun) -> list[Problem]:
    """There is a tokenizer where the config says."""
    if not run.tokenizer_error:
        return []
    key = "model.tokenizer_path" if run.config.model.tokenizer_path else "model.hf_assets_path"
    from toolkit.preflight.hub import download_line

    download = None if os.path.exists(run.tokenizer_path) else download_line(run.tokenizer_path)
    said, _, fix = run.tokenizer_error.partition("\n  fix:  ")
    fix = download or fix or "name a folder that has tokenizer.model or tokenizer.json"
    return [run.problem(key, said, fix)]


@rule()
def vocabulary_fits(run: PlannedRun) -> list[Problem]:
    """The embedding has a row for each token."""
    if run.model is None or run.vocabulary is None or run.vocabulary <= run.model.vocab_size:
        return []
    key = "model.vocab_size" if run.config.model.vocab_size else architecture_key(run.config)
    return [
        run.problem(
            key,
            f"the tokenizer in {run.tokenizer_path} has {run.vocabulary} tokens, the model "
            f"({run.model_label}) {run.model.vocab_size}",
            f"set model.vocab_size = {run.vocabulary}, or model.hf_assets_path to this model's tokenizer",
        )
    ]


@rule()
def sequence_fits_model(run: PlannedRun) -> list[Problem]:
    """A sequence is no longer than the model is made for."""
    if run.model is None:
        return []
    limit = run.model.max_seq_len
    keys = ["training.seq_len"] + (["validation.seq_len"] if run.config.validation.enable else [])
    return [
        run.problem(
            key,
            f"{run.model_label} is made for at most {limit} tokens",
            f"set it to at most {limit}, or raise model.max_seq_len",
        )
        for key in keys
        if run.config.value(key) > limit
    ]


@rule()
def device_has_dtype(run: PlannedRun) -> list[Problem]:
    """A GPU before Ampere has no bfloat16. (A CPU computes it without native support, slowly.)"""
    if run.hardware.device == "cpu" or run.hardware.native_bf16:
        return []
    return [
        run.problem(
            key,
            f"{run.hardware.name} has no bfloat16",
            'set it to "float32"' if key == "training.dtype" else 'set it to "float32", or to "auto"',
        )
        for key in ("training.dtype", "training.mixed_precision_param")
        if run.config.value(key) == "bfloat16"
    ]
