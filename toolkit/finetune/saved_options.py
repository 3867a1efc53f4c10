"""The table ``finetune`` of a run that has saved an adapter, and how adapters differ. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.checkpoint.manifest import read_manifest, saved_settings
from toolkit.config.finetune import Finetune
from toolkit.errors import CheckpointError
from toolkit.finetune.parameters import all_shapes, lora_targets, trained_names
from toolkit.finetune.peft_config import is_peft_folder, read_peft
from toolkit.models.common.args import ModelArgs

_TABLES = ("lora", "prefix_tuning", "llama_adapter")
_KEYS = ("adapter", "trainable", "frozen", "freeze_first_layers", "freeze_last_layers")
_COMPARED = {
    "lora": ("lora.rank", "lora.alpha", "lora.use_rslora", "lora.use_dora"),
    "prefix_tuning": ("prefix_tuning.num_virtual_tokens",),
    "llama_adapter": ("llama_adapter.adapter_len", "llama_adapter.adapter_layers", "llama_adapter.gate"),
}


def saved_options(folder: Path, args: ModelArgs) -> Finetune:
    """Options that make the adapter in ``folder``, PEFT's or a step-N of ours, anew for a model of ``args``.

    Raises:
        DataError, CheckpointError: there is none, it is damaged, or one of another model.
    """
    if is_peft_folder(folder):
        return read_peft(folder, args).options
    return finetune_of(folder, read_manifest(folder)["run"])


def finetune_of(step: Path, run: Mapping[str, Any]) -> Finetune:
    """The table of the run that saved the checkpoint ``step``.

    Raises:
        CheckpointError: its manifest does not tell.
    """
    table: dict[str, Any] = {}
    for key, value in saved_settings(run).items():
        first, _, rest = key.partition(".")
        name, _, inner = rest.partition(".")
        if first == "finetune" and name in _TABLES:
            table.setdefault(name, {})[inner] = value
        elif first == "finetune" and name in _KEYS:
            table[name] = value
    try:
        return Finetune.model_validate(table)
    except ValidationError as error:
        raise CheckpointError(
            f"the manifest of {step} does not tell what its adapter is: {error.errors()[0]['msg']}"
        ) from None


def differences(saved: Finetune, here: Finetune, args: ModelArgs) -> dict[str, Any]:
    """Values that keys of ``here`` would need for an adapter of ``saved``, by key, where they are others."""
    if saved.adapter != here.adapter:
        return {"finetune.adapter": saved.adapter}
    wanted = {
        f"finetune.{key}": _value(saved, key)
        for key in _COMPARED[here.adapter]
        if _value(saved, key) != _value(here, key)
    }
    if here.adapter == "lora" and lora_targets(args, saved) != lora_targets(args, here):
        wanted["finetune.lora.target_modules"] = saved.lora.target_modules
    return wanted


def resume_differences(
    saved: Finetune, here: Finetune, args: ModelArgs, *, optimizer: bool
) -> dict[str, Any]:
    """Values that keys of ``here`` would need to go on with a checkpoint of ``saved``, by key, where they are
    others; both have the same kind of adapter. Without the ``optimizer`` of the checkpoint a whole model may
    be trained otherwise than it was."""
    wanted = differences(saved, here, args) if here.adds else {}
    if saved.quantizes != here.quantizes:
        wanted["finetune.lora.quantize_base"] = saved.lora.quantize_base
    before, now = (trained_names(all_shapes(args, it), args, it) for it in (saved, here))
    if before != now and not wanted and (optimizer or here.adds):
        wanted = {
            f"finetune.{key}": getattr(saved, key)
            for key in _KEYS
            if getattr(saved, key) != getattr(here, key)
        }
    return wanted


def _value(options: Finetune, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(options, table), name)
