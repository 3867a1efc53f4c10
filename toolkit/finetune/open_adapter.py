"""Open adapters from PEFT folders and checkpoints, alone or together with their base."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError, first_few
from toolkit.finetune.base import check_base
from toolkit.finetune.parameters import added_shapes
from toolkit.finetune.peft_config import is_peft_folder, peft_base
from toolkit.finetune.peft_folder import open_peft
from toolkit.finetune.saved_adapter import Adapter, find_adapter
from toolkit.finetune.saved_options import finetune_of
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import parameter_shapes
from toolkit.weights.open import CheckpointWeights, open_weights
from toolkit.weights.source import WeightSource
from toolkit.weights.views import WithArgs

_NOT_COMPARED = ("max_seq_len",)
"""Model fields that do not affect the computation."""
_SHOWN = 6  # names in a message


def open_adapter(
    path: Path | str, args: ModelArgs, *, verify: bool = True, ranks: Ranks | None = None
) -> Adapter:
    """Open the adapter at ``path``, a PEFT folder or a checkpoint, for a model of ``args``.

    Raises:
        DataError, CheckpointError: there is no adapter, it is damaged, or it is for another model.
    """
    folder = expand_user(path)
    found = find_adapter(folder)
    if found is None:
        raise DataError(
            f"{folder} is not an adapter: it must be a PEFT folder (adapter_config.json and "
            "adapter_model.safetensors), or a checkpoint of a run with finetune.adapter"
        )
    if is_peft_folder(found):
        return open_peft(found, args)
    adapter = open_adapter_of(found, verify=verify, ranks=ranks)
    saved, current = asdict(adapter.args), asdict(args)
    differing = [key for key in current if saved[key] != current[key] and key not in _NOT_COMPARED]
    if differing:
        values = ", ".join(f"{key} {saved[key]} (this model: {current[key]})" for key in differing)
        raise DataError(
            f"the adapter in {found} is of another model: it was trained with {values}\n"
            "  fix:  set the same model.* in a run; tools accept the adapter's folder itself, or the output "
            "of llama-toolkit convert merge"
        )
    return adapter


def open_adapter_on(
    path: Path | str, base: WeightSource, *, verify: bool = True, ranks: Ranks | None = None
) -> Adapter:
    """Call :func:`open_adapter` and check that the adapter was trained on the weights of ``base``.

    Raises:
        DataError: it was trained on other weights.
    """
    adapter = open_adapter(path, base.args, verify=verify, ranks=ranks)
    if adapter.base:
        check_base(adapter.place, adapter.base, base)
    return adapter


def with_adapter(
    base: WeightSource,
    path: Path | str,
    *,
    verify: bool = True,
    ranks: Ranks | None = None,
    ema: bool = False,
) -> tuple[WeightSource, Adapter]:
    """Return ``base`` with the model args of the adapter at ``path``, if known, and the adapter.

    Raises:
        DataError, CheckpointError: as in :func:`open_adapter_on`.
    """
    step = find_adapter(expand_user(path))
    if step is None or is_peft_folder(step):
        if ema:
            raise DataError(f"{path} is not a checkpoint of this toolkit; only these have an EMA of weights")
        return base, open_adapter_on(path, base, verify=verify, ranks=ranks)
    adapter = open_adapter_of(step, verify=verify, ranks=ranks, ema=ema)
    check_base(step, adapter.base or {}, base)
    return WithArgs(base, adapter.args), adapter


def open_adapter_of(
    step: Path, *, verify: bool = True, ranks: Ranks | None = None, ema: bool = False
) -> Adapter:
    """Open the adapter in the checkpoint ``step``, for the model with which it was trained.

    Raises:
        DataError, CheckpointError: it is damaged.
    """
    manifest, metadata = open_checkpoint(step, verify=verify, ranks=ranks)
    run = manifest["run"]
    source = CheckpointWeights(step, metadata, run, ema=ema)
    options = finetune_of(step, run)
    found = {name: stored.shape for name, stored in source.tensors.items()}
    expected = added_shapes(source.args, options)
    expected |= {name: shape for name, shape in parameter_shapes(source.args).items() if name in found}
    if expected != found:
        wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        raise DataError(
            f"{step} does not match the adapter in its manifest: {first_few(sorted(wrong), _SHOWN)}"
        )
    values = {name: source.read(name) for name in found}
    return Adapter(step, source.args, options, values, run["base"], run)


def open_adapted(
    path: Path | str, *, verify: bool = True, ranks: Ranks | None = None, ema: bool = False
) -> tuple[WeightSource, Adapter | None]:
    """Open the model at ``path``. If it is an adapter, return its base, with the adapter's model args, and
    the adapter. ``ema`` reads the moving average of the trained weights.

    Raises:
        DataError, CheckpointError: as in :func:`toolkit.weights.open.open_weights` and :func:`open_adapter`.
    """
    adapter = find_adapter(expand_user(path))
    if adapter is None:
        return open_weights(path, verify=verify, ranks=ranks, ema=ema), None
    place = _base_place(adapter)
    try:
        base = open_weights(place, verify=verify, ranks=ranks)
    except (DataError, CheckpointError) as error:
        reason = str(error).partition("\n")[0].partition("; it must be")[0]
        raise DataError(
            f"{adapter} is an adapter whose base cannot be opened: {reason}\n"
            f"  fix:  pass the current path of the base {_adapter_option(adapter)}"
        ) from None
    return with_adapter(base, adapter, verify=verify, ranks=ranks, ema=ema)


def _base_place(adapter: Path) -> str:
    """Return the path of the base of an adapter found by :func:`find_adapter`.

    Raises:
        DataError: the path is not recorded, or the base was never on disk.
    """
    if is_peft_folder(adapter):
        place = peft_base(adapter)
    else:
        place = open_checkpoint(adapter, verify=False)[0]["run"]["base"]["place"]
    if not place or place.startswith("seed "):
        reason = f"was initialized from {place}" if place else "is not recorded"
        raise DataError(
            f"{adapter} is an adapter whose base model {reason}\n"
            f"  fix:  pass the base model {_adapter_option(adapter)}"
        )
    return place


def _adapter_option(adapter: Path) -> str:
    return f"and the adapter with --adapter {adapter} (llama-toolkit convert: merge BASE {adapter} OUT)"
