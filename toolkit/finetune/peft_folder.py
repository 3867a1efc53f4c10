"""PEFT's numbers and ours: tensors of an adapter in Hugging Face's order of rows, and a prefix's positions.

LoRA's B, DoRA's magnitudes and a prefix's keys have the rows of q and k, which Hugging Face keeps in another
order (:func:`toolkit.models.common.table.hf_row_order`).

PEFT keeps a prefix of n tokens as a cache of past keys and values: one row a token, in it each layer's keys
and then its values. The tokens that follow have positions from n on, and ours from 0. RoPE sees distances
alone: ours are PEFT's keys turned back by n positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.finetune.adapter import Adapter
from toolkit.finetune.parameters import IN_ATTENTION, is_added
from toolkit.finetune.peft_config import (
    PEFT_CONFIG,
    PEFT_TENSORS,
    PROMPTS,
    peft_config,
    read_peft,
    to_peft_name,
)
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.rope import rope_rotations, rotate
from toolkit.models.common.table import hf_row_order
from toolkit.models.parameters import table
from toolkit.weights.folder_write import Folder, no_progress, write_folder
from toolkit.weights.safetensors import SafetensorsFolder

_FINGERPRINT = "base_fingerprint"


def open_peft(folder: Path, args: ModelArgs) -> Adapter:
    """The adapter in PEFT's ``folder``, for a model of ``args``.

    Raises:
        DataError: see :func:`toolkit.finetune.peft_config.read_peft`.
    """
    about = read_peft(folder, args)
    try:
        file = safe_open(folder / PEFT_TENSORS, framework="pt")
    except SafetensorError as error:  # what the package itself will not have of the header
        raise DataError(f"{folder / PEFT_TENSORS} has a damaged header: {error}") from None
    with file:
        base = {"place": about.base}
        if said := (file.metadata() or {}).get(_FINGERPRINT):
            base["fingerprint"] = said
        if about.options.adapter == "prefix_tuning":
            tensors = _from_prompts(file.get_tensor(PROMPTS), args)
        else:
            theirs = {name: _stored_as(name, args, file.keys()) for name in about.shapes}
            tensors = {name: _ours(name, file.get_tensor(key), args) for name, key in theirs.items()}
    return Adapter(folder, args, about.options, tensors, base)


def _stored_as(name: str, args: ModelArgs, keys: Sequence[str]) -> str:
    theirs = to_peft_name(name, args)
    return theirs if theirs in keys else f"{theirs}.weight"  # as some versions call a magnitude


def write_peft(
    adapter: Adapter,
    out: Path,
    *,
    dtype: torch.dtype,
    others: Mapping[str, bytes],
    ranks: Ranks,
    replace: bool = False,
) -> None:
    """Write ``adapter`` as PEFT's folder ``out``, in ``dtype``, with the files ``others`` beside it.

    Of ``ranks`` rank 0 writes. The folder appears whole; with ``replace`` one of before goes.

    Raises:
        DataError: PEFT has no such adapter.
        CheckpointError: the folder cannot be written.
    """
    replaced = [name for name in adapter.tensors if not is_added(name)]
    said = peft_config(adapter.args, adapter.options, base=_base_name(adapter.base), replaced=replaced)
    folder = Folder(
        files={PEFT_TENSORS: list(adapter.tensors)},
        others={PEFT_CONFIG: (json.dumps(said, indent=2) + "\n").encode(), **others},
        write=partial(_save, adapter, dtype),
        opened=SafetensorsFolder,
    )
    write_folder(adapter, out, folder, ranks=ranks, progress=no_progress, replace=replace)


def _base_name(base: Mapping[str, str] | None) -> str | None:
    """The name that PEFT loads the base by: the full one of a folder that is there; else as it was called."""
    place = (base or {}).get("place", "")
    if expand_user(place).is_dir():
        return str(expand_user(place).resolve())
    return None if not place or place.startswith("seed ") else place


def _save(adapter: Adapter, dtype: torch.dtype, path: Path, names: Sequence[str]) -> None:
    tensors = {name: adapter.read(name) for name in names}
    if adapter.options.adapter == "prefix_tuning":
        theirs = {PROMPTS: _to_prompts(tensors, adapter.args)}
    else:
        args = adapter.args
        theirs = {to_peft_name(name, args): _theirs(name, tensor, args) for name, tensor in tensors.items()}
    metadata = {"format": "pt"}
    if fingerprint := (adapter.base or {}).get("fingerprint"):
        metadata[_FINGERPRINT] = fingerprint
    save_file({name: it.to(dtype).contiguous() for name, it in theirs.items()}, path, metadata=metadata)


def _theirs(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    """Our ``tensor`` as PEFT keeps it."""
    if name.endswith(f"{IN_ATTENTION}prompt"):
        return tensor[None]
    return tensor[_order(len(tensor), args)] if _reordered(name, args) else tensor


def _ours(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    """PEFT's ``tensor`` as it is here."""
    if name.endswith(f"{IN_ATTENTION}prompt"):
        return tensor[0]
    return tensor[_order(len(tensor), args).argsort()] if _reordered(name, args) else tensor


def _reordered(name: str, args: ModelArgs) -> bool:
    module, _, part = name.rpartition(".")
    rows = part in ("lora_b", "magnitude", "weight", "bias")
    row = table(args).get(f"{module}.weight")
    return rows and row is not None and row.rotary > 0


def _order(rows: int, args: ModelArgs) -> Tensor:
    return torch.tensor(hf_row_order(range(rows), args.head_dim))


def _names(layer: int) -> tuple[str, str]:
    return f"layers.{layer}{IN_ATTENTION}keys", f"layers.{layer}{IN_ATTENTION}values"


def _to_prompts(tensors: Mapping[str, Tensor], args: ModelArgs) -> Tensor:
    rows = []
    for layer in range(args.n_layers):
        keys_KPE, values_KPE = (tensors[name] for name in _names(layer))
        turned_KPE = _turned(keys_KPE, keys_KPE.shape[1], args)[..., _order(args.head_dim, args)]
        rows += [turned_KPE, values_KPE]
    return torch.stack(rows).permute(2, 0, 1, 3).flatten(1)


def _from_prompts(prompts: Tensor, args: ModelArgs) -> dict[str, Tensor]:
    rows = prompts.unflatten(1, (2 * args.n_layers, args.n_kv_heads, args.head_dim)).permute(1, 2, 0, 3)
    found: dict[str, Any] = {}
    for layer in range(args.n_layers):
        keys_KPE = rows[2 * layer][..., _order(args.head_dim, args).argsort()]
        keys, values = _names(layer)
        found[keys] = _turned(keys_KPE, -len(prompts), args)
        found[values] = rows[2 * layer + 1].contiguous()
    return found


def _turned(keys_KPE: Tensor, positions: int, args: ModelArgs) -> Tensor:
    """Keys as they are so many positions further on."""
    rotations = rope_rotations(args, torch.tensor([positions]), torch.float64)
    return (
        rotate(keys_KPE.transpose(0, 1)[None].double(), rotations)[0]
        .transpose(0, 1)
        .to(keys_KPE.dtype)
        .contiguous()
    )
