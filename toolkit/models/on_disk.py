"""The folder of a model's weights, and the shape that the files there tell. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import read_manifest, saved_settings
from toolkit.config.local_paths import expand_user
from toolkit.errors import CheckpointError, DataError, join_or, quote
from toolkit.io.json_fields import read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.spec import CONFIG
from toolkit.models.registry import families, spec

EXPORTS = "hf"
"""Folder, inside that of a run, of the Hugging Face folders that it writes, one a step."""
_MAX_CONFIG = 1_000_000  # bytes of a config.json, which has some thousand


def read_hf_config(folder: Path) -> ModelArgs:
    """Read the shape of the model whose config.json is in ``folder``.

    Raises:
        DataError: there is none, or it is of no model that is known; every field at fault is named.
    """
    path = folder / CONFIG
    values = read_object(path, at_most=_MAX_CONFIG)
    kind = values.get("model_type") or families()[0]
    forms = {family: spec(family).hf_config() for family in families()}
    for family, form in forms.items():
        if kind == form.model_type:
            return replace(form.read(values, path), family=family)
    known = join_or(repr(form.model_type) for form in forms.values())
    raise DataError(
        f"{path} is of no model that can be read: model_type = {quote(kind)} (it must be {known}, or what "
        "custom_import registers)"
    )


def read_meta_params(folder: Path, *, vocab_size: int) -> ModelArgs:
    """Read the shape of the model whose params.json is in ``folder``. That names no family: it is taken for
    the first that has such files.

    ``vocab_size`` is that of the embedding, for a file that leaves it to the tokenizer.

    Raises:
        DataError: there is none, or it is of another model; every field at fault is named.
    """
    form = next(form for family in families() if (form := spec(family).meta_params()) is not None)
    return form.args_of(folder, vocab_size=vocab_size)


def hugging_face_folder(path: str) -> Path:
    """The folder that a user means by ``path``: that, or of a checkpoint the folder that its run has written
    beside it at the same step. torchtitan's ``last_save_in_hf`` writes it in the checkpoint's place."""
    folder = expand_user(path)
    try:
        saved = saved_settings(read_manifest(folder)["run"])
    except CheckpointError:
        return folder  # no checkpoint, or one of which another check tells what is wrong
    beside = _run_folder(folder, saved) if isinstance(folder, Path) else folder.parent
    exported = beside / EXPORTS / folder.name
    return exported if exported.is_dir() else folder


def _run_folder(step: Path, saved: Mapping[str, Any]) -> Path:
    """The folder of the run with the config ``saved``: as many levels above its checkpoint as that says,
    wherever the folder was moved since."""
    inside = Path(saved.get("checkpoint.folder", "checkpoint"))
    if inside.is_absolute():
        return expand_user(saved["job.dump_folder"])
    return Path(os.path.normpath(step.joinpath("..", *[".."] * len(inside.parts))))
