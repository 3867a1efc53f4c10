"""Fine-tuning options of saved adapters, and their differences from a run's. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
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
_KEYS = (
    "adapter",
    "trainable",
    "trainable_token_indices",
    "frozen",
    "freeze_first_layers",
    "freeze_last_layers",
)
_COMPARED = {
    "lora": ("lora.rank", "lora.alpha", "lora.use_rslora", "lora.use_dora", "trainable_token_indices"),
    "prefix_tuning": ("prefix_tuning.num_virtual_tokens",),
    "llama_adapter": ("llama_adapter.adapter_len", "llama_adapter.adapter_layers", "llama_adapter.gate"),
}


def saved_options(folder: Path, args: ModelArgs) -> Finetune:
    """Return the options of the adapter in ``folder``, a PEFT folder or a step-N, for a model of ``args``.

    Raises:
        DataError, CheckpointError: there is no adapter, it is damaged, or it is for another model.
    """
    if is_peft_folder(folder):
        return read_peft(folder, args).options
    return finetune_of(folder, read_manifest(folder)["run"])


def finetune_of(step: Path, run: Mapping[str, Any]) -> Finetune:
    """Return the fine-tuning options of the run that saved the checkpoint ``step``.

    Raises:
        CheckpointError: the manifest has no valid options.
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
            f"the manifest of {step} has no valid adapter options: {error.errors()[0]['msg']}"
        ) from None


def differences(saved: Finetune, current: Finetune, args: ModelArgs) -> dict[str, Any]:
    """Return the keys of ``current``, with new values, that must change to load an adapter of ``saved``."""
    if saved.adapter != current.adapter:
        return {"finetune.adapter": saved.adapter}
    required = {
        f"finetune.{key}": attrgetter(key)(saved)
        for key in _COMPARED[current.adapter]
        if attrgetter(key)(saved) != attrgetter(key)(current)
    }
    if current.adapter == "lora" and lora_targets(args, saved) != lora_targets(args, current):
        required["finetune.lora.target_modules"] = saved.lora.target_modules
    return required


def resume_differences(
    saved: Finetune, current: Finetune, args: ModelArgs, *, optimizer: bool
) -> dict[str, Any]:
    """Return the keys of ``current``, with new values, that must change to resume a checkpoint of ``saved``.

    Both options must have the same type of adapter. If the checkpoint's ``optimizer`` is not loaded, other
    parameters of a full model may be trained.
    """
    required = differences(saved, current, args) if current.adds else {}
    if saved.quantizes != current.quantizes:
        required["finetune.lora.quantize_base"] = saved.lora.quantize_base
    before, now = (trained_names(all_shapes(args, it), args, it) for it in (saved, current))
    if before != now and not required and (optimizer or current.adds):
        required = {
            f"finetune.{key}": getattr(saved, key)
            for key in _KEYS
            if getattr(saved, key) != getattr(current, key)
        }
    return required
