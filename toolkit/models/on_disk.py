"""Find folders of model weights, and read model args from them. Imports no torch."""

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
"""Folder, inside the run's folder, of its Hugging Face exports, one per step."""
_MAX_CONFIG = 1_000_000  # bytes; a config.json usually has about a thousand


def read_hf_config(folder: Path) -> ModelArgs:
    """Read the model args from config.json in ``folder``.

    Raises:
            DataError: the file is missing, or describes an unknown model; every invalid field is reported.
    """
    path = folder / CONFIG
    values = read_object(path, at_most=_MAX_CONFIG)
    model_type = values.get("model_type") or families()[0]
    configs = {family: spec(family).hf_config() for family in families()}
    for family, config in configs.items():
        if model_type in (config.model_type, config.multimodal_type):
            return replace(config.read(values, path), family=family)
    known = join_or(repr(config.model_type) for config in configs.values())
    raise DataError(
        f"{path} describes an unsupported model: model_type = {quote(model_type)} (it must be {known}, or "
        "one that job.custom_import registers)"
    )


def read_meta_params(folder: Path, *, vocab_size: int) -> ModelArgs:
    """Read the model args from params.json in ``folder``. The file does not name its family, so the first
    family with a Meta format is assumed.

    ``vocab_size`` is the embedding's, for a file that leaves it to the tokenizer.

    Raises:
        DataError: the file is missing, or describes another model; every invalid field is reported.
    """
    params = next(params for family in families() if (params := spec(family).meta_params()) is not None)
    return params.read_args(folder, vocab_size=vocab_size)


def hugging_face_folder(path: str) -> Path:
    """Return the Hugging Face folder at ``path``. If ``path`` is a checkpoint, return its run's export of the
    same step, if any.

    torchtitan's ``last_save_in_hf`` writes such a folder instead of the checkpoint, so users pass the
    checkpoint's path.
    """
    folder = expand_user(path)
    try:
        saved = saved_settings(read_manifest(folder)["run"])
    except CheckpointError:
        return folder  # not a checkpoint, or one that another check rejects
    run_folder = _run_folder(folder, saved) if isinstance(folder, Path) else folder.parent
    exported = run_folder / EXPORTS / folder.name
    return exported if exported.is_dir() else folder


def _run_folder(step: Path, saved: Mapping[str, Any]) -> Path:
    """Return the run's folder, derived from the checkpoint ``step`` and the ``saved`` config, in case the run
    was moved."""
    inside = Path(saved.get("checkpoint.folder", "checkpoint"))
    if inside.is_absolute():
        return expand_user(saved["job.dump_folder"])
    return Path(os.path.normpath(step.joinpath("..", *[".."] * len(inside.parts))))
