"""Which tensors a Hugging Face folder holds and where their bytes are, from the headers alone. No torch.

A safetensors file is eight bytes of length, a JSON header of that length and the data, without holes. All of
it is checked against the file's size, so that whoever reads the bytes later need not doubt the places.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.local_paths import open_regular
from toolkit.errors import DataError, first_few, quote
from toolkit.io.json_fields import is_size, parse_json, read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.models.parameters import table

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an item of each dtype that weights may have, by safetensors' name of it."""
_BUFFER_BYTES = dict(BOOL=1, U8=1, I8=1, I16=2, U16=2, I32=4, U32=4, I64=8, U64=8, C64=8)

ONE_SAVE = "\n  fix:  keep one: move the other away, or link the files of one into a folder of its own"

_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 8
_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are ``begin`` … ``end`` − 1."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def model_entries(folder: Path, args: ModelArgs) -> tuple[dict[str, Entry], str]:
    """The weights in the folder of a model of ``args``, by the name that each has there, and a note of the
    buffers that are ignored.

    Whether the weights are those of the model is not compared. Of a tied pair the embedding is there, and
    the head where both are stored.

    Raises:
        DataError: no weights, or two saves of them; a file is missing, damaged or not what the index says;
            the model is quantized.
    """
    rows, found = table(args), folder_entries(folder)
    due = {row.hf for row in rows.values()}
    buffers = {name: entry.dtype for name, entry in found.items() if entry.dtype not in ITEM_BYTES}
    note = ignored(folder, buffers, found, due)
    entries = {
        name: entry for name, entry in found.items() if name not in buffers and rows.from_hf(name) is not None
    }
    if args.tie_embeddings:
        head, embedding = rows.to_hf(HEAD), rows.to_hf(EMBEDDING)
        if head in entries and embedding not in entries:  # as safetensors' save_model leaves the pair
            entries[embedding] = entries.pop(head)
    return entries, note


def ignored(place: Path, buffers: Mapping[str, object], stored: Collection[str], due: Collection[str]) -> str:
    """Tell that ``buffers``, dtypes by the names of tensors of no floating-point numbers, are ignored, as
    transformers does; "" where there are none.

    Raises:
        DataError: one is a weight of a quantized model: it has the name of one that is ``due``, or lies
            beside one that is not ``stored``.
    """
    for name, dtype in buffers.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if name in due or (weight in due and weight not in stored):
            raise _no_weight(place, name, dtype)
    said = f"{place} also stores {first_few(sorted(buffers), _SHOWN)}: ignored, no weight of this model"
    return said if buffers else ""


def folder_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder by the name it has there.

    Raises:
        DataError: no weights, or two saves of them; a file is missing, damaged or not what the index says.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise DataError(f"{folder} has no weights: {_instead_of_safetensors(folder)}")
        _refuse_two_saves(folder, SINGLE, [])
        return file_entries(folder / SINGLE)
    weight_map = _weight_map(folder / INDEX)
    files = sorted(set(weight_map.values()))
    _refuse_two_saves(folder, INDEX, files)
    absent = [name for name in files if not _is_file(folder / name)]
    if absent:
        raise DataError(
            f"{folder / INDEX} names files that are not there: {first_few(absent, _SHOWN)}\n"
            "  fix:  download the folder again; what is there already is not fetched twice"
        )
    found: dict[str, Entry] = {}
    for file in files:
        entries = file_entries(folder / file)
        twice = [f"{name} in {found[name].file.name} and in {file}" for name in entries if name in found]
        if twice:
            raise DataError(f"{folder} holds tensors twice: {first_few(twice, _SHOWN)}")
        found |= entries
    elsewhere = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if name not in found or found[name].file.name != file
    ]
    if elsewhere:
        raise DataError(f"{folder / INDEX} names tensors that are not there: {first_few(elsewhere, _SHOWN)}")
    return found


def _refuse_two_saves(folder: Path, taken: str, files: list[str]) -> None:
    """Raise DataError where the folder has other weights than those that the file ``taken`` holds, or that
    its ``files`` do."""
    others = [path.name for path in folder.glob("consolidated.*.pth")]
    if taken == INDEX:
        others += [path.name for path in folder.glob("*.safetensors.index.json")]
        others += [SINGLE] * (_is_file(folder / SINGLE) and files != [SINGLE])
    # A format of its maker's, which lies beside transformers' in downloads and is read by neither.
    others = [name for name in others if name not in (taken, "consolidated.safetensors.index.json")]
    if others:
        raise DataError(f"{folder} holds two saves of a model, {taken} and {min(others)}{ONE_SAVE}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def file_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of one safetensors file.

    Raises:
        DataError: the file cannot be read, is cut short, or its header is not true of it.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER or 8 + length > size:
                raise DataError(f"{path} is no safetensors file, or cut short: it has {size:,} bytes")
            header = parse_json(file.read(length), _without_repeats)
    except OSError as error:
        fix = "see that it is a file which this user may read"
        raise DataError(f"{path} cannot be read: {error.strerror}\n  fix:  {fix}") from None
    except ValueError as error:
        raise DataError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise DataError(f"{path} has a damaged header: no JSON object")
    about = header.pop("__metadata__", None)
    if about is None:
        about = {}
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise DataError(f"{path} has a damaged header: its __metadata__ are no texts by name")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise DataError(f"{path} has a header that lies: its tensors overlap or leave holes")
        end = entry.end
    if end != size:
        what = "is cut short" if end > size else "has bytes after its last tensor"
        raise DataError(f"{path} {what}: its header describes {end:,} bytes, it has {size:,}")
    return entries


def _entry(path: Path, name: str, value: Any, data: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if isinstance(dtype, str) and dtype not in ITEM_BYTES | _BUFFER_BYTES:
        raise _no_weight(path, name, dtype)
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
    if end - begin != math.prod(shape) * (ITEM_BYTES | _BUFFER_BYTES)[dtype]:
        what = f"{name} of shape {tuple(shape)} in {dtype} has {end - begin:,} bytes"
        raise DataError(f"{path} has a header that lies: {what}")
    return Entry(path, dtype, tuple(shape), data + begin, data + end)


def _no_weight(path: Path, name: str, dtype: object) -> DataError:
    return DataError(
        f"{path} holds {name} as {dtype}; weights must be one of {', '.join(ITEM_BYTES)}: quantized models "
        "are not supported\n  fix:  take the model that this one was made from"
    )


def _weight_map(path: Path) -> Mapping[str, str]:
    found = read_object(path).get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in found.values()
    ):
        raise DataError(f"{path} has no weight_map of tensors to files beside it")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python alone would keep the last of two equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        often = Counter(name for name, _ in pairs)
        raise ValueError(f"{quote(often.most_common(1)[0][0], str)} is there twice")
    return found


def _instead_of_safetensors(folder: Path) -> str:
    """Tell what there is in place of safetensors, and what to do."""
    if not folder.is_dir():
        return "there is no such folder"
    if any(folder.glob("*.bin")):
        return (
            "its .bin files are pickles, and only safetensors are read\n  fix:  save it again with "
            "transformers' save_pretrained, or take the safetensors of the same model"
        )
    return f"neither {SINGLE} nor {INDEX} is there"
