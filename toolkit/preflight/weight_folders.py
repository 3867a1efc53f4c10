"""Explain how to use a folder that does not contain the expected weights."""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoint.manifest import MANIFEST, committed_steps
from toolkit.finetune.peft_config import is_peft_folder
from toolkit.models.common.spec import CONFIG, PARAMS
from toolkit.preflight.hub import download_line


def instead_of_checkpoint(folder: Path) -> str:
    """Return the fix for a ``folder`` that is not a checkpoint of this toolkit."""
    if (folder / CONFIG).is_file():
        return "it is a Hugging Face folder: set checkpoint.initial_load_in_hf = true"
    return _converted(folder) or "use a step-N folder of a finished save"


def instead_of_hugging_face(folder: Path, path: str) -> tuple[str, str] | None:
    """Return why ``folder``, given as ``path``, is not a Hugging Face folder, and the fix; None if it is
    one."""
    if not folder.exists():
        fix = download_line(path) or f"use a folder with {CONFIG} and safetensors"
        return f"there is no folder {folder} (from {Path.cwd()})", fix
    if not folder.is_dir():
        return f"{folder} is not a folder", f"use the folder with {CONFIG} and the safetensors"
    if (folder / CONFIG).is_file():
        return None
    if (folder / MANIFEST).is_file() or committed_steps(folder):
        fix = "set checkpoint.initial_load_in_hf = false, and checkpoint.initial_load_path to a step-N folder"
        return f"{folder} contains a checkpoint of this toolkit, not a Hugging Face model", fix
    fix = _converted(folder) or f"use a folder with {CONFIG} and safetensors"
    return f"{folder} has no {CONFIG}", fix


def _converted(folder: Path) -> str:
    """Return the fix for Meta's files or an adapter, if ``folder`` contains them."""
    if is_peft_folder(folder):
        return (
            f"it contains an adapter: start from its base model with finetune.adapter_path = {folder}, or "
            f"merge it first: llama-toolkit convert merge BASE {folder} OUT"
        )
    if not (folder / PARAMS).is_file():
        return ""
    return (
        "it contains Meta's files: convert them with llama-toolkit convert meta-to-dcp "
        f'{folder} OUT; then set checkpoint.initial_load_path = "OUT/step-0" and '
        "checkpoint.initial_load_in_hf = false"
    )
