"""The model that an adapter is trained on: which it is.

Checkpoints of an adapter hold what is trained and a fingerprint of the rest, so that they are small, and so
that an adapter cannot go on with other weights than it began with.
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
    """Which model an adapter is trained on: ``place`` and ``fingerprint``, and what its linear layers are
    ``quantized`` to."""
    quantized = config.finetune.lora.quantize_base if config.finetune.quantizes else "none"
    place = weights_folder(config) or config.checkpoint.initial_load_path
    if place is None:
        seed = config.debug.seed or 0
        text = json.dumps([seed, dict(shape)], sort_keys=True)
        named, digest = f"seed {seed}", hashlib.sha256(text.encode()).hexdigest()
    else:
        named, digest = str(expand_user(place).resolve()), fingerprint(open_weights(place, verify=False))
    return {"place": named, "fingerprint": digest, "quantized": quantized}


def fingerprint(source: WeightSource) -> str:
    """SHA-256 of names, shapes and the first row of each tensor: other weights have another, and a large
    model takes no longer than its tensors are many."""
    digest = hashlib.sha256()
    for name, stored in sorted(source.tensors.items()):
        digest.update(f"{name} {stored.shape} ".encode())
        first = (slice(0, _SAMPLED_ROWS), *(slice(0, size) for size in stored.shape[1:]))
        digest.update(source.read(name, first).float().numpy().tobytes())
    return digest.hexdigest()


def refuse_another(saved: Mapping[str, str] | None, here: Mapping[str, str]) -> None:
    """Raise CheckpointError where an adapter was trained on another model than ``here``."""
    if saved is None:
        raise CheckpointError(
            "the checkpoint is one of a whole model, and this run trains an adapter\n"
            "  fix:  name it as checkpoint.initial_load_path, and another job.dump_folder"
        )
    if saved["fingerprint"] != here["fingerprint"]:
        raise CheckpointError(
            f"the adapter of the checkpoint was trained on other weights: those of {saved['place']}, while "
            f"this run's are {here['place']}\n  fix:  start from the same weights "
            "(checkpoint.initial_load_path, model.hf_assets_path)"
        )
    if saved.get("quantized", "none") != here["quantized"]:
        raise CheckpointError(
            f"the adapter of the checkpoint was trained with finetune.lora.quantize_base = "
            f'"{saved.get("quantized", "none")}", which here is "{here["quantized"]}": it would go on with '
            "other weights\n  fix:  set it to the former, or start in another job.dump_folder"
        )


def refuse_another_base(
    adapter: Path, trained_on: Mapping[str, str], base: WeightSource | Mapping[str, str]
) -> None:
    """Raise DataError where an adapter was trained on other weights than those of ``base``, a source or what
    :func:`base_of` tells, as far as it tells by a fingerprint: PEFT's own folders have none."""
    place, said = trained_on.get("place", ""), trained_on.get("fingerprint")
    if not said or (place.startswith("seed ") and not isinstance(base, Mapping)):
        return  # a model that was drawn has no weights to compare
    if isinstance(base, Mapping):
        here, found = base["place"], base["fingerprint"]
    else:
        here, found = str(base.place), fingerprint(base)
    if said != found:
        raise DataError(
            f"the adapter {adapter} was trained on other weights: those of {place}, while these are {here}\n"
            "  fix:  name the model that it was trained on"
        )
