"""Identity of an adapter's base model.

Checkpoints of an adapter contain only the trained parameters and a fingerprint of the base, so that an
adapter cannot be resumed with other weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.errors import CheckpointError, DataError
from toolkit.models.from_config import weights_folder
from toolkit.weights.open import open_weights
from toolkit.weights.source import WeightSource

_SAMPLED_ROWS = 1


def base_of(config: Config, shape: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``place`` and ``fingerprint`` of an adapter's base model, and the format in which its linear
    layers are ``quantized``."""
    quantized = config.finetune.lora.quantize_base if config.finetune.quantizes else "none"
    place = weights_folder(config) or config.checkpoint.initial_load_path
    if place is None:
        seed = config.debug.seed or 0
        text = json.dumps([seed, dict(shape)], sort_keys=True)
        name, digest = f"seed {seed}", hashlib.sha256(text.encode()).hexdigest()
    else:
        name, digest = str(expand_user(place).resolve()), fingerprint(open_weights(place, verify=False))
    return {"place": name, "fingerprint": digest, "quantized": quantized}


def fingerprint(source: WeightSource) -> str:
    """Return the SHA-256 of the names, shapes and first rows of all tensors; fast even for large models."""
    digest = hashlib.sha256()
    for name, stored in sorted(source.tensors.items()):
        digest.update(f"{name} {stored.shape} ".encode())
        first = (slice(0, _SAMPLED_ROWS), *(slice(0, size) for size in stored.shape[1:]))
        digest.update(source.read(name, first).float().numpy().tobytes())
    return digest.hexdigest()


def check_same_base(saved: Mapping[str, str] | None, current: Mapping[str, str]) -> None:
    """Raise CheckpointError if an adapter was trained on a base model other than ``current``."""
    if saved is None:
        raise CheckpointError(
            "the checkpoint has a full model, but this run trains an adapter\n"
            "  fix:  set it as checkpoint.initial_load_path, and another job.dump_folder"
        )
    if saved["fingerprint"] != current["fingerprint"]:
        raise CheckpointError(
            f"the adapter of the checkpoint was trained on other weights: those of {saved['place']}, while "
            f"this run's are {current['place']}\n  fix:  start from the same weights "
            "(checkpoint.initial_load_path, model.hf_assets_path)"
        )
    if saved.get("quantized", "none") != current["quantized"]:
        raise CheckpointError(
            f"the adapter of the checkpoint was trained with finetune.lora.quantize_base = "
            f'"{saved.get("quantized", "none")}", but this run has "{current["quantized"]}", and so other '
            "weights\n  fix:  set it to the former, or start in another job.dump_folder"
        )


def check_base(adapter: Path, trained_on: Mapping[str, str], base: WeightSource | Mapping[str, str]) -> None:
    """Raise DataError if an adapter was trained on weights other than those of ``base``, a weight source or
    the result of :func:`base_of`. Folders written by PEFT have no fingerprint to compare."""
    place, expected = trained_on.get("place", ""), trained_on.get("fingerprint")
    if not expected or (place.startswith("seed ") and not isinstance(base, Mapping)):
        return  # a randomly initialized base has no weights to compare
    if isinstance(base, Mapping):
        current, actual = base["place"], base["fingerprint"]
    else:
        current, actual = str(base.place), fingerprint(base)
    if expected != actual:
        raise DataError(
            f"the adapter {adapter} was trained on other weights: those of {place}, not {current}\n"
            "  fix:  use the model that it was trained on"
        )
