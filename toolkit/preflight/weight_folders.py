"""Tell what a folder that should hold weights holds in their place, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from toolkit.checkpoint.manifest import MANIFEST, committed_steps
from toolkit.finetune.peft_config import is_peft_folder
from toolkit.models.common.spec import CONFIG, PARAMS
from toolkit.preflight.hub import download_line


def instead_of_checkpoint(folder: Path) -> str:
    """Advise what to do where ``folder`` is no checkpoint of ours."""
    if (folder / CONFIG).is_file():
        return "it is a Hugging Face folder: set checkpoint.initial_load_in_hf = true"
    return _converted(folder) or "name a step-N folder of a finished save"


def instead_of_hugging_face(folder: Path, path: str) -> tuple[str, str] | None:
    """Why ``folder``, which the user wrote as ``path``, is no Hugging Face folder, and what to do; None if it
    looks like one."""
    if not folder.exists():
        fix = download_line(path) or f"name a folder that has {CONFIG} and safetensors"
        return f"there is no folder {folder} (from {Path.cwd()})", fix
    if not folder.is_dir():
        return f"{folder} is no folder", f"name the folder that has {CONFIG} and the safetensors"
    if (folder / CONFIG).is_file():
        return None
    if (folder / MANIFEST).is_file() or committed_steps(folder):
        fix = "set checkpoint.initial_load_in_hf = false, and checkpoint.initial_load_path to a step-N folder"
        return f"{folder} holds a checkpoint of this toolkit, not a Hugging Face model", fix
    fix = _converted(folder) or f"name a folder that has {CONFIG} and safetensors"
    return f"{folder} has no {CONFIG}", fix


def _converted(folder: Path) -> str:
    """Advise what to do about Meta's files or an adapter, where ``folder`` has them."""
    if is_peft_folder(folder):
        return (
            f"it holds an adapter: name its base here and finetune.adapter_path = {folder}, or merge it "
            f"first: python -m tools.convert_weights merge BASE {folder} OUT"
        )
    if not (folder / PARAMS).is_file():
        return ""
    return (
        "it holds Meta's files: python -m tools.convert_weights meta-to-dcp "
        f'{folder} OUT makes a checkpoint of them; then set checkpoint.initial_load_path = "OUT/step-0" and '
        "checkpoint.initial_load_in_hf = false"
    )
