"""Convert adapter tensors between PEFT folders and this toolkit: row order, and positions of a prefix.

LoRA's B, DoRA's magnitudes and a prefix's keys have the rows of q and k, whose order in Hugging Face's format
differs (:func:`toolkit.models.common.parameter_table.hf_row_order`).

PEFT stores a prefix of n tokens as past keys and values: one row per token, with each layer's keys and
values. In PEFT, the positions of the following tokens start at n; in this toolkit, they start at 0. Because
RoPE depends only on distances, our keys are PEFT's rotated back by n positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.finetune.parameters import (
    IN_ATTENTION,
    added_name,
    is_added,
    lora_targets,
    updates_embedding,
)
from toolkit.finetune.peft_config import (
    PEFT_CONFIG,
    PEFT_TENSORS,
    PROMPTS,
    expert_keys,
    peft_config,
    read_peft,
    to_peft_name,
)
from toolkit.finetune.peft_experts import FusedExperts, fused_experts
from toolkit.finetune.saved_adapter import Adapter
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import hf_row_order
from toolkit.models.common.rope import rope_rotations, rotate
from toolkit.models.parameters import table
from toolkit.weights.folder_write import Folder, no_progress, write_folder
from toolkit.weights.safetensors import SafetensorsFolder

_FINGERPRINT = "base_fingerprint"


def open_peft(folder: Path, args: ModelArgs) -> Adapter:
    """Open the adapter in a PEFT ``folder``, for a model of ``args``.

    Raises:
            DataError: as in :func:`toolkit.finetune.peft_config.read_peft`.
    """
    header = read_peft(folder, args)
    try:
        file = safe_open(folder / PEFT_TENSORS, framework="pt")
    except SafetensorError as error:  # the package rejects the header
        raise DataError(f"{folder / PEFT_TENSORS} has a damaged header: {error}") from None
    with file:
        base = {"place": header.base}
        if fingerprint := (file.metadata() or {}).get(_FINGERPRINT):
            base["fingerprint"] = fingerprint
        if header.options.adapter == "prefix_tuning":
            tensors = _from_prompts(file.get_tensor(PROMPTS), args)
        else:
            tensors = {}
            for fused in header.experts:
                if header.keys.keys() >= fused.names.keys():
                    keys = dict.fromkeys(expert_keys([fused]).values())
                    tensors |= _from_fused(fused, *map(file.get_tensor, keys), folder=folder)
            for name, key in header.keys.items():
                if name not in tensors:
                    tensors[name] = _from_peft(name, file.get_tensor(key), args)
            if header.options.adapter == "lora":
                tensors = {name: _padded(it, header.shapes[name]) for name, it in tensors.items()}
    return Adapter(folder, args, header.options, tensors, base)


def write_peft(
    adapter: Adapter,
    out: Path,
    *,
    dtype: torch.dtype,
    others: Mapping[str, bytes],
    ranks: Ranks,
    replace: bool = False,
) -> None:
    """Write ``adapter`` as a PEFT folder ``out``, in ``dtype``, with the files ``others``.

    Rank 0 of ``ranks`` writes. The folder is created atomically; ``replace`` replaces an existing one.

    Raises:
        DataError: PEFT has no such adapter.
        CheckpointError: the folder cannot be written.
    """
    replaced = [name for name in adapter.tensors if not is_added(name)]
    config = peft_config(adapter.args, adapter.options, base=_base_name(adapter.base), replaced=replaced)
    folder = Folder(
        files={PEFT_TENSORS: list(adapter.tensors)},
        others={PEFT_CONFIG: (json.dumps(config, indent=2) + "\n").encode(), **others},
        write=partial(_save, adapter, dtype),
        open=SafetensorsFolder,
    )
    write_folder(adapter, out, folder, ranks=ranks, progress=no_progress, replace=replace)


def _base_name(base: Mapping[str, str] | None) -> str | None:
    """Return the name by which PEFT loads the base: the absolute path of an existing folder, otherwise the
    name unchanged."""
    place = (base or {}).get("place", "")
    if expand_user(place).is_dir():
        return str(expand_user(place).resolve())
    return None if not place or place.startswith("seed ") else place


def _save(adapter: Adapter, dtype: torch.dtype, path: Path, names: Sequence[str]) -> None:
    tensors = {name: adapter.read(name) for name in names}
    args = adapter.args
    if adapter.options.adapter == "prefix_tuning":
        converted = {PROMPTS: _to_prompts(tensors, args)}
    else:
        converted = {}
        targets = lora_targets(args, adapter.options) if adapter.options.adapter == "lora" else []
        for fused in fused_experts(args, targets):
            keys = dict.fromkeys(expert_keys([fused]).values())
            converted |= dict(zip(keys, _to_fused(fused, tensors, adapter.options.lora.rank), strict=True))
            tensors = {name: it for name, it in tensors.items() if name not in fused.names}
        converted |= {to_peft_name(name, args): _to_peft(name, it, args) for name, it in tensors.items()}
    metadata = {"format": "pt"}
    if fingerprint := (adapter.base or {}).get("fingerprint"):
        metadata[_FINGERPRINT] = fingerprint
    save_file({name: it.to(dtype).contiguous() for name, it in converted.items()}, path, metadata=metadata)


def _to_peft(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    if name.endswith(f"{IN_ATTENTION}prompt"):
        return tensor[None]
    if updates_embedding(name):
        return tensor.mT
    return tensor[_order(len(tensor), args)] if _is_reordered(name, args) else tensor


def _from_peft(name: str, tensor: Tensor, args: ModelArgs) -> Tensor:
    if name.endswith(f"{IN_ATTENTION}prompt"):
        return tensor[0]
    if updates_embedding(name):
        return tensor.mT.contiguous()
    return tensor[_order(len(tensor), args).argsort()] if _is_reordered(name, args) else tensor


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Append zeros to ``tensor`` up to ``shape``."""
    missing = [
        amount for size, found in zip(shape, tensor.shape, strict=True) for amount in (size - found, 0)
    ]
    return F.pad(tensor, missing[::-1]) if any(missing) else tensor


def _to_fused(fused: FusedExperts, tensors: Mapping[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return PEFT's tensors for the parts lora_a and lora_b, in blocks, for our ``tensors`` of experts."""
    count, a_parts, b_parts = len(fused.rows), [], []
    for index, row in enumerate(fused.rows):
        experts, size, columns = row.shape
        a, b = torch.zeros(experts, rank, columns), torch.zeros(experts, size, rank)
        if row.name in fused.adapted:
            a, b = (tensors[added_name(row, part)] for part in ("lora_a", "lora_b"))
        a_parts.append(a)
        b_parts.append(F.pad(b, (index * rank, (count - 1 - index) * rank)))
    a_ERK, b_ENR = torch.cat(a_parts, 1), torch.cat(b_parts, 1)
    if fused.interleaved:
        b_ENR = b_ENR.unflatten(1, (count, -1)).transpose(1, 2).flatten(1, 2)
    # PEFT reshapes its A (E·R, in) to (E, R, in), and its B (out, R·E) to (out, R, E).
    if fused.swapped:
        return a_ERK.permute(2, 1, 0).flatten(1), b_ENR.transpose(1, 2).flatten(0, 1)
    return a_ERK.flatten(0, 1), b_ENR.permute(1, 2, 0).flatten(1)


def _from_fused(fused: FusedExperts, a: Tensor, b: Tensor, *, folder: Path) -> dict[str, Tensor]:
    """Return our tensors of experts for PEFT's tensors of the parts lora_a and lora_b.

    Raises:
        DataError: B should be block-diagonal, but is not.
    """
    experts, count = fused.rows[0].experts, len(fused.rows)
    if fused.swapped:
        a_ERK = a.unflatten(1, (-1, experts)).permute(2, 1, 0)
        b_ENR = b.unflatten(0, (experts, -1)).transpose(1, 2)
    else:
        a_ERK, b_ENR = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if fused.interleaved:
        b_ENR = b_ENR.unflatten(1, (-1, count)).transpose(1, 2).flatten(1, 2)
    tensors: dict[str, Tensor] = {}
    for index, (row, rows_ENR) in enumerate(zip(fused.rows, b_ENR.chunk(count, 1), strict=True)):
        its_a = a_ERK
        if fused.blocks:
            its_a = a_ERK.chunk(count, 1)[index]
            blocks = rows_ENR.chunk(count, 2)
            if any(block.any() for other, block in enumerate(blocks) if other != index):
                raise DataError(
                    f"{folder}: the update of {fused.parameter} has rank {a_ERK.shape[1]}, of which gate and "
                    "up do not have a half each, so the adapter has no single rank here\n"
                    "  fix:  merge it with PEFT (merge_and_unload)"
                )
            rows_ENR = blocks[index]
        tensors |= {
            added_name(row, "lora_a"): its_a.contiguous().clone(),
            added_name(row, "lora_b"): rows_ENR.contiguous(),
        }
    return tensors


def _is_reordered(name: str, args: ModelArgs) -> bool:
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
        rotated_KPE = _rotate_keys(keys_KPE, keys_KPE.shape[1], args)[..., _order(args.head_dim, args)]
        rows += [rotated_KPE, values_KPE]
    return torch.stack(rows).permute(2, 0, 1, 3).flatten(1)


def _from_prompts(prompts: Tensor, args: ModelArgs) -> dict[str, Tensor]:
    rows = prompts.unflatten(1, (2 * args.n_layers, args.n_kv_heads, args.head_dim)).permute(1, 2, 0, 3)
    tensors: dict[str, Any] = {}
    for layer in range(args.n_layers):
        keys_KPE = rows[2 * layer][..., _order(args.head_dim, args).argsort()]
        keys, values = _names(layer)
        tensors[keys] = _rotate_keys(keys_KPE, -len(prompts), args)
        tensors[values] = rows[2 * layer + 1].contiguous()
    return tensors


def _rotate_keys(keys_KPE: Tensor, positions: int, args: ModelArgs) -> Tensor:
    """Rotate keys by a number of positions."""
    rotations = rope_rotations(args, torch.tensor([positions]), torch.float64)
    return (
        rotate(keys_KPE.transpose(0, 1)[None].double(), rotations)[0]
        .transpose(0, 1)
        .to(keys_KPE.dtype)
        .contiguous()
    )
