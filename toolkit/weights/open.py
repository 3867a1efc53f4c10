"""Open weights on disk in any format: a Hugging Face folder, a Meta folder, or a checkpoint.

A checkpoint is a step-N folder; given a folder of checkpoints or a run's folder, the newest one is opened. A
folder with weights in two formats is rejected, because they may belong to different models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import tensor_entries
from toolkit.checkpoint.manifest import MANIFEST, committed_steps, step_folder
from toolkit.checkpoint.read_tensor import open_checkpoint, read_chunks, saved_chunks
from toolkit.config.local_paths import expand_user
from toolkit.config.types import MAX_LAYERS, MAX_SIZE
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError, join_or
from toolkit.io.json_fields import Fields, check_heads, is_count, is_size
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.spec import CONFIG, PARAMS
from toolkit.models.on_disk import EXPORTS
from toolkit.models.registry import families
from toolkit.optim.optimizer_state import EMA_PREFIX
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import Region, StoredTensor, WeightSource

MODEL_PREFIX = "model."
"""Prefix of a model's tensors in a checkpoint."""

_NEEDED = """it must be one of
    a Hugging Face folder: config.json and model.safetensors, or shards with model.safetensors.index.json
    a Meta folder: params.json and consolidated.00.pth, consolidated.01.pth …
    a checkpoint of this toolkit: a step-N folder, or a folder of step-N folders"""


class CheckpointWeights:
    """The model in a checkpoint, as a :class:`~toolkit.weights.source.WeightSource`.

    ``metadata`` is the validated index of the tensors, ``run`` the manifest's entry. With ``ema``, trained
    weights are their moving average.

    Raises:
        CheckpointError: the manifest has no valid model args, or there is no average.
    """

    def __init__(self, folder: Path, metadata: Metadata, run: Mapping[str, Any], *, ema: bool = False):
        self.place = folder
        self.run = run
        self.args = _args(folder, run.get("model"))
        entries = tensor_entries(metadata)
        if ema and not any(name.startswith(EMA_PREFIX) for name in entries):
            raise CheckpointError(f"{folder} has no EMA of weights: its run did not set optimizer.ema_decay")
        names = [it.removeprefix(MODEL_PREFIX) for it in entries if it.startswith(MODEL_PREFIX)]
        averaged = {name for name in names if ema and EMA_PREFIX + name in entries}
        stored = {name: (EMA_PREFIX if name in averaged else MODEL_PREFIX) + name for name in names}
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(entries[key].size), entries[key].properties.dtype)
            for name, key in stored.items()
        }
        self._chunks = cache(lambda name: saved_chunks(folder, metadata, stored[name]))

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """See :meth:`toolkit.weights.source.WeightSource.read`."""
        stored = self.tensors[name]
        return read_chunks(self._chunks(name), stored.shape, stored.dtype, region, out)


_MAY_BE_ZERO = ("q_lora_rank", "temperature")
"""Numbers that may be 0 although that is not their default."""


def _args(folder: Path, shape: dict[str, Any] | None) -> ModelArgs:
    """Read model args written by :func:`dataclasses.asdict`, possibly before a field was added."""
    given = Fields(shape or {})
    args: ModelArgs = _read(given, ModelArgs)
    if args.family not in families():
        given.reject("family", f"must be {', '.join(families())}, or registered by job.custom_import")
    if args.moe and not given.problems and (inner := given.inner("moe")):
        for name, rule in args.moe.broken_rules().items():
            inner.reject(name, rule)
    check_heads(
        given, heads="n_heads", kv_heads="n_kv_heads", n_heads=args.n_heads, n_kv_heads=args.n_kv_heads
    )
    try:
        given.finish(f"the manifest of {folder} has no valid model args")
    except DataError as error:
        raise CheckpointError(str(error)) from None
    return args


def _read(given: Fields, kind: Any) -> Any:
    """Read a dataclass of numbers, flags, names and other dataclasses. Numbers are positive, or 0 if that is
    their default; a field with a default may be missing."""
    for name in given.values.keys() - _names(kind):
        given.reject(name, "is not a model field of this toolkit")
    hints = get_type_hints(kind)
    return kind(**{it.name: _value(given, it, hints[it.name]) for it in fields(kind)})


def _value(given: Fields, field: Field[Any], hint: Any) -> Any:
    name, value, default = field.name, given.values.get(field.name), field.default
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and default is not MISSING:
        return default
    if classes := [it for it in kinds if is_dataclass(it)]:
        if (inner := given.inner(name)) is None:
            return None
        # Of RoPE's scalings, the smallest with most of these fields.
        found = inner.values.keys()
        return _read(inner, min(classes, key=lambda it: (-len(found & _names(it)), len(_names(it)))))
    if get_origin(hint) is tuple:
        of_names = get_args(hint)[0] is str
        fits = (lambda it: isinstance(it, str)) if of_names else partial(is_count, at_most=MAX_SIZE)
        if isinstance(value, list) and all(map(fits, value)) and (value or default is not MISSING):
            return tuple(value)
        given.reject(name, f"must be a list of {'names' if of_names else 'sizes'}")
        return ()
    if hint is str or get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value not in allowed if allowed else not isinstance(value, str):
            given.reject(name, f"must be {join_or(map(json.dumps, allowed)) if allowed else 'a name'}")
            return default
        return value
    if hint is bool:
        return given.flag(name)
    may_be_zero = default == 0 or name in _MAY_BE_ZERO
    if may_be_zero and (is_size(value) or (int not in kinds and value == 0.0)):
        return value
    if int in kinds:
        if may_be_zero and value is not None:
            given.reject(name, "must be a nonnegative integer")
            return 0
        return given.count(name, at_most=MAX_LAYERS if name == "n_layers" else MAX_SIZE)
    return given.positive(name)


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def open_weights(
    path: Path | str, *, verify: bool = True, ranks: Ranks | None = None, ema: bool = False
) -> WeightSource:
    """Open the weights at ``path``, reading only headers. ``verify`` checks the hashes of a checkpoint,
    divided among ``ranks`` (:func:`~toolkit.checkpoint.read_tensor.open_checkpoint`). ``ema`` reads the
    moving average of the weights in a checkpoint.

    Raises:
        DataError, CheckpointError: there are no weights, or no average, or their headers, config or manifest
            are invalid.
    """
    folder = expand_user(path)
    step = find_checkpoint(folder)
    if step is not None:
        if step != folder and (other := _first(folder, "*.safetensors", "consolidated.*.pth")):
            raise DataError(
                f"{folder} has a model in two formats, {other.name} and the checkpoint {step}\n"
                f"  fix:  use {step} itself, or move one of them away"
            )
        manifest, metadata = open_checkpoint(step, verify=verify, ranks=ranks)
        return CheckpointWeights(step, metadata, manifest["run"], ema=ema)
    if ema:
        raise DataError(f"{folder} is not a checkpoint of this toolkit; only these have an EMA of weights")
    if not folder.is_dir():
        what, hint = ("is a file", "") if folder.exists() else ("does not exist", _hub_hint(str(path)))
        raise DataError(f"{folder} {what}; {_NEEDED}{hint}")
    if _first(folder, "*.safetensors", "*.safetensors.index.json"):
        return SafetensorsFolder(folder)
    if _first(folder, "consolidated.*.pth"):
        return MetaFolder(folder)
    contents = "no weights"
    if _first(folder, CONFIG, PARAMS):
        contents = "a config but no weights"
    if _first(folder, "pytorch_model*.bin"):
        contents = "only pytorch_model.bin: save the model as safetensors with transformers"
    raise DataError(f"{folder} has {contents}; {_NEEDED}")


def find_checkpoint(folder: Path) -> Path | None:
    """Return ``folder`` if it is a step-N, else the newest step in it; None if there is no checkpoint.

    Raises:
        CheckpointError: there are steps, but none is committed.
    """
    if (folder / MANIFEST).is_file() or (folder.name.startswith("step-") and (folder / ".metadata").exists()):
        return folder
    for candidate in _step_parents(folder):
        if steps := committed_steps(candidate):
            return step_folder(candidate, steps[-1])
    if _first(folder, "step-*/.metadata"):
        raise CheckpointError(f"{folder} has step-N folders, but no committed checkpoint")
    return None


def _step_parents(folder: Path) -> Iterator[Path]:
    """Yield the folders that may contain the steps, ``folder`` and its subfolders, because a run can choose
    the subfolder's name."""
    yield from (folder, folder / "checkpoint")
    if not _first(folder, CONFIG, PARAMS):
        inside = {path.parent for path in folder.glob("*/step-*")}
        yield from sorted(path for path in inside if path.name != EXPORTS)


def _first(folder: Path, *patterns: str) -> Path | None:
    """Return a path in ``folder`` that matches one of the ``patterns``, or None."""
    return next((path for pattern in patterns for path in folder.glob(pattern)), None)


def _hub_hint(name: str) -> str:
    """Return the fix for a path that looks like a model id of the Hugging Face Hub."""
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return ""
    folder = name.partition("/")[2]
    return (
        f"\n  fix:  for a model of the Hugging Face Hub: hf download {name} --local-dir {folder}, then use "
        f"{folder}; a gated model, such as Meta's, requires accepting its license there and hf auth login"
    )
