"""Names, shapes and file offsets of the tensors in a Hugging Face folder, read from headers only. Imports no
torch.

A safetensors file has an eight-byte length, a JSON header of that length, and the data without gaps. The
header is validated against the file size, so that readers can rely on the offsets.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.local_paths import open_regular
from toolkit.errors import DataError, first_few, quote
from toolkit.io.json_fields import is_size, parse_json, read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD, ParameterTable
from toolkit.models.parameters import table

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Element sizes of supported dtypes, by safetensors' names."""
FP8, FP8_BLOCK = "F8_E4M3", 128
"""The dtype of quantized matrices that are read, and the number of rows and columns that share a scale."""
_SCALE = "_scale_inv"
FP4, FP4_BLOCK = "MXFP4", 32
"""The dtype of quantized experts that are read, and the number of elements of a row that share a scale."""
_FP4_BLOCKS, _FP4_SCALES = "_blocks", "_scales"
_LANGUAGE, _VISION = "language_model.", ("vision_model.", "multi_modal_projector.")
"""Prefixes of the names in a multimodal folder."""
_BUFFER_BYTES = dict(BOOL=1, U8=1, I8=1, I16=2, U16=2, I32=4, U32=4, I64=8, U64=8, C64=8)
_ALL_BYTES = ITEM_BYTES | _BUFFER_BYTES | {FP8: 1}
_WEIGHTS = (*ITEM_BYTES, FP8, FP4)

ONE_SAVE = "\n  fix:  keep one: move the other away, or link the files of one into another folder"

_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 8
_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes ``begin`` … ``end`` − 1. ``scales`` are those of a matrix in fp8 or
    MXFP4, one per block."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    scales: Entry | None = None


def model_entries(folder: Path, args: ModelArgs) -> tuple[dict[str, Entry], str]:
    """Return a model's weights by their names in the files, and a note about ignored tensors: buffers, a
    multi-token prediction layer after the last block, and parts that read images.

    Names and shapes are not compared with ``args``. A tied embedding is always included; the head only if
    both are stored.

    Raises:
        DataError: there are no weights, or weights in two formats; a file is missing, damaged or inconsistent
            with the index; or the model is quantized.
    """
    rows = table(args)
    found, notes = _without_vision(folder, folder_entries(folder))
    found, predictor = _without_predictor(folder, found, f"model.layers.{args.n_layers}.")
    notes += predictor
    found = _with_fp4(folder, _with_scales(folder, found, rows), rows)
    buffers = {name: entry.dtype for name, entry in found.items() if entry.dtype not in _WEIGHTS}
    notes.append(ignored_note(folder, buffers, found, rows.hf_shapes))
    entries = {name: entry for name, entry in found.items() if name not in buffers and rows.from_hf(name)}
    if args.tie_embeddings:
        head, embedding = rows.to_hf(HEAD), rows.to_hf(EMBEDDING)
        if head in entries and embedding not in entries:  # safetensors' save_model stores the pair like this
            entries[embedding] = entries.pop(head)
    return entries, "\n".join(filter(None, notes))


def _without_vision(folder: Path, found: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Return the tensors of the language model by their names without images, and a note about the image
    parts."""
    if not any(name.startswith(_LANGUAGE) for name in found):
        return dict(found), []
    kept = {it.removeprefix(_LANGUAGE): entry for it, entry in found.items() if not it.startswith(_VISION)}
    what = f"{' and '.join(f'{name}*' for name in _VISION)}, {len(found) - len(kept):,} tensors"
    return kept, [f"{folder} also stores {what}: ignored, images are not supported"]


def _without_predictor(
    folder: Path, found: Mapping[str, Entry], prefix: str
) -> tuple[dict[str, Entry], list[str]]:
    """Return the tensors outside the layer ``prefix``, if that is one of multi-token prediction, and a note
    about it."""
    if f"{prefix}eh_proj.weight" not in found:
        return dict(found), []
    kept = {name: entry for name, entry in found.items() if not name.startswith(prefix)}
    what = f"{prefix}*, {len(found) - len(kept):,} tensors"
    return kept, [f"{folder} also stores {what}: ignored, multi-token prediction is not supported"]


def _with_scales(folder: Path, found: dict[str, Entry], rows: ParameterTable) -> dict[str, Entry]:
    """Return the tensors without the scales of matrices in fp8, which become part of their entries.

    Raises:
        DataError: a matrix in fp8 has no such scales, or its rows are stored in another order.
    """
    scaled = {}
    for name, entry in found.items():
        if entry.dtype != FP8:
            continue
        scales, row = found.get(name + _SCALE), rows.row_of(name)
        blocks = tuple(-(-size // FP8_BLOCK) for size in entry.shape)
        fits = scales is not None and scales.shape == blocks and scales.dtype in ITEM_BYTES
        if not fits or len(blocks) != 2 or (row is not None and row.rotary):
            raise _not_a_weight(folder, name, entry.dtype)
        scaled[name] = replace(entry, scales=scales)
    return {name: it for name, it in found.items() if name.removesuffix(_SCALE) not in scaled} | scaled


def _with_fp4(folder: Path, found: dict[str, Entry], rows: ParameterTable) -> dict[str, Entry]:
    """Return the tensors with fused experts in MXFP4 as one entry each, for blocks (E, N, K / 32, 16) and
    scales (E, N, K / 32), with the name and shape of the dequantized tensor.

    Raises:
        DataError: blocks have no such scales.
    """
    quantized = {}
    for name, blocks in found.items():
        stands_for = name.removesuffix(_FP4_BLOCKS)
        row = rows.row_of(stands_for)
        if stands_for == name or row is None or row.fused is None:
            continue
        scales = found.get(stands_for + _FP4_SCALES)
        fits = scales is not None and blocks.shape == (*scales.shape, FP4_BLOCK // 2)
        if scales is None or not fits or len(scales.shape) != 3 or {blocks.dtype, scales.dtype} != {"U8"}:
            raise _not_a_weight(folder, name, blocks.dtype)
        experts, width, groups = scales.shape
        shape = (experts, groups * FP4_BLOCK, width)
        quantized[stands_for] = replace(blocks, dtype=FP4, shape=shape, scales=scales)
    parts = {f"{name}{end}" for name in quantized for end in (_FP4_BLOCKS, _FP4_SCALES)}
    return {name: it for name, it in found.items() if name not in parts} | quantized


def ignored_note(
    place: Path, buffers: Mapping[str, object], stored: Collection[str], expected: Collection[str]
) -> str:
    """Return a note that ``buffers`` (dtypes of non-floating-point tensors) are ignored, as in transformers;
    "" if there are none.

    Raises:
        DataError: a buffer belongs to a quantized model: it has the name of an ``expected`` weight, or is
            next to an expected weight that is not ``stored``.
    """
    for name, dtype in buffers.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if name in expected or (weight in expected and weight not in stored):
            raise _not_a_weight(place, name, dtype)
    note = f"{place} also stores {first_few(sorted(buffers), _SHOWN)}: ignored, not weights of this model"
    return note if buffers else ""


def folder_entries(folder: Path) -> dict[str, Entry]:
    """Return every tensor in the folder by its name in the files.

    Raises:
        DataError: there are no weights, or weights in two formats; or a file is missing, damaged or
            inconsistent with the index.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise DataError(f"{folder} has no weights: {_missing_safetensors(folder)}")
        _reject_other_formats(folder, SINGLE, [])
        return file_entries(folder / SINGLE)
    weight_map = _weight_map(folder / INDEX)
    files = sorted(set(weight_map.values()))
    _reject_other_formats(folder, INDEX, files)
    missing = [name for name in files if not _is_file(folder / name)]
    if missing:
        raise DataError(
            f"{folder / INDEX} lists files that do not exist: {first_few(missing, _SHOWN)}\n"
            "  fix:  download the folder again; existing files are not downloaded twice"
        )
    found: dict[str, Entry] = {}
    for file in files:
        entries = file_entries(folder / file)
        twice = [f"{name} in {found[name].file.name} and in {file}" for name in entries if name in found]
        if twice:
            raise DataError(f"{folder} has duplicate tensors: {first_few(twice, _SHOWN)}")
        found |= entries
    missing = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if name not in found or found[name].file.name != file
    ]
    if missing:
        raise DataError(f"{folder / INDEX} lists tensors that do not exist: {first_few(missing, _SHOWN)}")
    return found


def _reject_other_formats(folder: Path, used: str, files: list[str]) -> None:
    """Raise DataError if the folder has weights other than the file ``used`` or its ``files``."""
    others = [path.name for path in folder.glob("consolidated.*.pth")]
    if used == INDEX:
        others += [path.name for path in folder.glob("*.safetensors.index.json")]
        others += [SINGLE] * (_is_file(folder / SINGLE) and files != [SINGLE])
    # The consolidated format, which some downloads contain next to transformers', is not read.
    others = [name for name in others if name not in (used, "consolidated.safetensors.index.json")]
    if others:
        raise DataError(f"{folder} has a model in two formats, {used} and {min(others)}{ONE_SAVE}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # not a valid file name
        return False


def file_entries(path: Path) -> dict[str, Entry]:
    """Return every tensor of one safetensors file.

    Raises:
        DataError: the file cannot be read, is truncated, or its header is invalid.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER or 8 + length > size:
                raise DataError(f"{path} is not a safetensors file, or truncated: it has {size:,} bytes")
            header = parse_json(file.read(length), _unique_keys)
    except OSError as error:
        fix = "check that it is a file that this user may read"
        raise DataError(f"{path} cannot be read: {error.strerror}\n  fix:  {fix}") from None
    except ValueError as error:
        raise DataError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise DataError(f"{path} has a damaged header: not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DataError(f"{path} has a damaged header: its __metadata__ must be strings by name")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise DataError(f"{path} has an invalid header: its tensors overlap or leave gaps")
        end = entry.end
    if end != size:
        what = "is truncated" if end > size else "has bytes after its last tensor"
        raise DataError(f"{path} {what}: its header describes {end:,} bytes, it has {size:,}")
    return entries


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if isinstance(dtype, str) and dtype not in _ALL_BYTES:
        raise _not_a_weight(path, name, dtype)
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(map(is_size, shape))
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(is_size, offsets))
    ):
        raise DataError(f"{path} has a damaged header: the entry of {name} is {quote(value, json.dumps)}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ALL_BYTES[dtype]:
        what = f"{name} of shape {tuple(shape)} in {dtype} has {end - begin:,} bytes"
        raise DataError(f"{path} has an invalid header: {what}")
    return Entry(path, dtype, tuple(shape), data + begin, data + end)


def _not_a_weight(path: Path, name: str, dtype: object) -> DataError:
    return DataError(
        f"{path} has {name} as {dtype}; weights must be one of {', '.join(ITEM_BYTES)}: quantized models "
        "are not supported\n  fix:  use the original model"
    )


def _weight_map(path: Path) -> Mapping[str, str]:
    found = read_object(path).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in found.values()
    ):
        raise DataError(f"{path} has no weight_map from tensors to files in the same folder")
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, rejecting duplicate keys; Python would keep the last one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{quote(counts.most_common(1)[0][0], str)} occurs twice")
    return found


def _missing_safetensors(folder: Path) -> str:
    """Describe what is wrong with a folder without safetensors, with a fix."""
    if not folder.is_dir():
        return "there is no such folder"
    if any(folder.glob("*.bin")):
        return (
            "its .bin files are pickles, and only safetensors are read\n  fix:  save it again with "
            "transformers' save_pretrained, or use the safetensors of the same model"
        )
    return f"it has neither {SINGLE} nor {INDEX}"
