"""Rules about the model, its tokenizer and the precision."""

from __future__ import annotations

import os
import re

from toolkit.errors import DataError, Problem
from toolkit.preflight.facts import Run, rule
from toolkit.wording import closest

PUBLISHED = {
    "Llama-2-7b-hf": ("llama2", "7B"),
    "Llama-2-13b-hf": ("llama2", "13B"),
    "Llama-2-70b-hf": ("llama2", "70B"),
    "Meta-Llama-3-8B": ("llama3.0", "8B"),
    "Meta-Llama-3-70B": ("llama3.0", "70B"),
    "Llama-3.1-8B": ("llama3.1", "8B"),
    "Llama-3.1-70B": ("llama3.1", "70B"),
    "Llama-3.1-405B": ("llama3.1", "405B"),
    "Llama-3.2-1B": ("llama3.2", "1B"),
    "Llama-3.2-3B": ("llama3.2", "3B"),
    "Llama-3.3-70B-Instruct": ("llama3.3", "70B"),
}
"""Repositories of meta-llama on the Hugging Face Hub, and what they are called here."""

_MISTAKEN = {
    "llama-3-8b": "Meta-Llama-3-8B",
    "llama-3-70b": "Meta-Llama-3-70B",
    "llama-3-405b": "Llama-3.1-405B",
    "llama-3-1b": "Llama-3.2-1B",
    "llama-3-3b": "Llama-3.2-3B",
}
"""Names that documents use for repositories that do not exist under them."""

_LOOKS_PUBLISHED = re.compile(r"(meta-)?llama-\d", re.IGNORECASE)


def published_name(text: str) -> str | None:
    """Return the Hub's name of the model that an id or the last part of a path means, if it means one."""
    stem = os.path.basename(text.rstrip("/"))
    if not _LOOKS_PUBLISHED.match(stem):
        return None
    plain = stem.lower().removesuffix("-instruct")
    return _MISTAKEN.get(plain) or closest(plain, PUBLISHED)


@rule()
def model_exists(run: Run) -> list[Problem]:
    """The preset exists, and its changed fields go together."""
    name = run.config.model.name
    published = published_name(name)
    if published is None:
        return [run.located(problem) for problem in run.model_problems]
    family, flavor = PUBLISHED[published]
    return [
        run.problem(
            "model.name",
            "is the id of a repository; model.name is a family and model.flavor a size",
            f'did you mean {published}? Then set model.name = "{family}" and model.flavor = "{flavor}"',
        )
    ]


@rule(DataError)
def tokenizer_readable(run: Run) -> list[Problem]:
    """There is a tokenizer where the config says."""
    if not run.tokenizer_error:
        return []
    key = "model.tokenizer_path" if run.config.model.tokenizer_path else "model.hf_assets_path"
    published = None if os.path.exists(run.tokenizer_path) else published_name(run.tokenizer_path)
    fix = "name a folder that has tokenizer.model or tokenizer.json"
    if published:
        stem = os.path.basename(run.tokenizer_path.rstrip("/"))
        meant = "" if stem.lower().startswith(published.lower()) else f"did you mean {published}? "
        fix = f"{meant}Download meta-llama/{published} and give the local folder"
    return [run.problem(key, run.tokenizer_error, fix)]


@rule()
def vocabulary_fits(run: Run) -> list[Problem]:
    """The embedding has a row for each token."""
    if run.model is None or run.vocabulary is None or run.vocabulary <= run.model.vocab_size:
        return []
    model = run.config.model
    key = "model.vocab_size" if model.vocab_size else "model.flavor"
    return [
        run.problem(
            key,
            f"the tokenizer in {run.tokenizer_path} has {run.vocabulary} tokens, the model "
            f"({model.name} {model.flavor}) {run.model.vocab_size}",
            f"set model.vocab_size = {run.vocabulary}, or model.hf_assets_path to this model's tokenizer",
        )
    ]


@rule()
def sequence_fits_model(run: Run) -> list[Problem]:
    """A sequence is no longer than the model is made for."""
    if run.model is None:
        return []
    limit = run.model.max_seq_len
    keys = ["training.seq_len"] + (["validation.seq_len"] if run.config.validation.enable else [])
    return [
        run.problem(
            key,
            f"{run.config.model.name} {run.config.model.flavor} is made for at most {limit} tokens",
            f"set it to at most {limit}, or raise model.max_seq_len",
        )
        for key in keys
        if run.config.value(key) > limit
    ]


@rule()
def device_has_dtype(run: Run) -> list[Problem]:
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
