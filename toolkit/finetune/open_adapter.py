"""Adapters, opened from PEFT's folders and from checkpoints, and models that are an adapter on a base."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError, first_few
from toolkit.finetune.adapter import Adapter, find_adapter
from toolkit.finetune.base import refuse_another_base
from toolkit.finetune.parameters import added_shapes
from toolkit.finetune.peft_config import is_peft_folder, peft_base
from toolkit.finetune.peft_folder import open_peft
from toolkit.finetune.saved_options import finetune_of
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import parameter_shapes
from toolkit.weights.open import CheckpointWeights, open_weights
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Shaped

_UNLIKE = ("max_seq_len",)
"""Fields of a model that change nothing of its computation."""
_SHOWN = 6


def open_adapter(
    path: Path | str, args: ModelArgs, *, verify: bool = True, ranks: Ranks | None = None
) -> Adapter:
    """The adapter at ``path``, PEFT's folder or a checkpoint of ours, for a model of ``args``.

    Raises:
        DataError, CheckpointError: there is none, it is damaged, or it is one of another model.
    """
    folder = expand_user(path)
    found = find_adapter(folder)
    if found is None:
        raise DataError(
            f"{folder} is no adapter: it must be a folder of PEFT's (adapter_config.json and "
            "adapter_model.safetensors), or a checkpoint of a run with finetune.adapter"
        )
    if is_peft_folder(found):
        return open_peft(found, args)
    adapter = open_adapter_of(found, verify=verify, ranks=ranks)
    theirs, ours = asdict(adapter.args), asdict(args)
    differing = [key for key in ours if theirs[key] != ours[key] and key not in _UNLIKE]
    if differing:
        said = ", ".join(f"{key} {theirs[key]} (this model: {ours[key]})" for key in differing)
        raise DataError(
            f"the adapter in {found} is not one of this model: it was trained with {said}\n"
            "  fix:  give a run the same model.*; a tool takes that folder itself, or what "
            "tools.convert_weights merge makes of a LoRA and its base"
        )
    return adapter


def open_adapter_on(
    path: Path | str, base: WeightSource, *, verify: bool = True, ranks: Ranks | None = None
) -> Adapter:
    """:func:`open_adapter`, for the weights of ``base``.

    Raises:
        DataError: it was trained on others.
    """
    adapter = open_adapter(path, base.args, verify=verify, ranks=ranks)
    if adapter.base:
        refuse_another_base(adapter.place, adapter.base, base)
    return adapter


def with_adapter(
    base: WeightSource, path: Path | str, *, verify: bool = True, ranks: Ranks | None = None
) -> tuple[WeightSource, Adapter]:
    """``base`` in the shape that the adapter at ``path`` was trained in, as far as it tells, and the adapter.

    Raises:
        DataError, CheckpointError: see :func:`open_adapter_on`.
    """
    step = find_adapter(expand_user(path))
    if step is None or is_peft_folder(step):
        return base, open_adapter_on(path, base, verify=verify, ranks=ranks)
    adapter = open_adapter_of(step, verify=verify, ranks=ranks)
    refuse_another_base(step, adapter.base or {}, base)
    return Shaped(base, adapter.args), adapter


def open_adapter_of(step: Path, *, verify: bool = True, ranks: Ranks | None = None) -> Adapter:
    """The adapter in a checkpoint ``step`` of ours, for the model that it was trained with.

    Raises:
        DataError, CheckpointError: it is damaged.
    """
    manifest, metadata = open_checkpoint(step, verify=verify, ranks=ranks)
    run = manifest["run"]
    source = CheckpointWeights(step, metadata, run)
    options = finetune_of(step, run)
    found = {name: stored.shape for name, stored in source.tensors.items()}
    due = added_shapes(source.args, options)
    due |= {name: shape for name, shape in parameter_shapes(source.args).items() if name in found}
    if due != found:
        wrong = [name for name in due.keys() | found.keys() if due.get(name) != found.get(name)]
        raise DataError(
            f"{step} does not hold the adapter that it tells of: {first_few(sorted(wrong), _SHOWN)}"
        )
    values = {name: source.read(name) for name in found}
    return Adapter(step, source.args, options, values, run["base"], run)


def open_adapted(
    path: Path | str, *, verify: bool = True, ranks: Ranks | None = None
) -> tuple[WeightSource, Adapter | None]:
    """The model at ``path``; where that is an adapter, its base, in the shape that it was trained in, and the
    adapter.

    Raises:
        DataError, CheckpointError: see :func:`toolkit.weights.open.open_weights` and :func:`open_adapter`.
    """
    adapter = find_adapter(expand_user(path))
    if adapter is None:
        return open_weights(path, verify=verify, ranks=ranks), None
    place = _base_place(adapter)
    try:
        base = open_weights(place, verify=verify, ranks=ranks)
    except (DataError, CheckpointError) as error:
        said = str(error).partition("\n")[0].partition("; it must be")[0]
        raise DataError(
            f"{adapter} is an adapter, and its base cannot be opened: {said}\n"
            f"  fix:  name the base where it is now, {_beside(adapter)}"
        ) from None
    return with_adapter(base, adapter, verify=verify, ranks=ranks)


def _base_place(adapter: Path) -> str:
    """Where the base of the adapter in a folder that :func:`find_adapter` gives is.

    Raises:
        DataError: it does not say, or the base was never on disk.
    """
    if is_peft_folder(adapter):
        place = peft_base(adapter)
    else:
        place = open_checkpoint(adapter, verify=False)[0]["run"]["base"]["place"]
    if not place or place.startswith("seed "):
        was = f"was drawn by {place}" if place else "is not named"
        raise DataError(
            f"{adapter} is an adapter, and the model that it belongs to {was}\n"
            f"  fix:  name that model, {_beside(adapter)}"
        )
    return place


def _beside(adapter: Path) -> str:
    """How a program is told of an adapter beside its base."""
    return f"and the adapter with --adapter {adapter} (of tools.convert_weights: merge BASE {adapter} OUT)"
