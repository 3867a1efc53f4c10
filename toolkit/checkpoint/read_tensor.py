"""Where tensors lie in the files of a checkpoint: regions are read without a group and without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import METADATA, read_metadata, tensor_place, tensors_of
from toolkit.checkpoint.load import share
from toolkit.checkpoint.manifest import ADVICE, check_files, read_manifest
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, first_few
from toolkit.hardware import cores
from toolkit.io.tensor_file import Region, TensorPlace, new_output, read_region, whole


@dataclass(frozen=True)
class TensorPiece:
    """The part of a tensor that one rank has saved: the box at ``offsets``."""

    place: TensorPlace
    offsets: tuple[int, ...]


def open_checkpoint(
    folder: Path, *, verify: bool = True, ranks: Ranks | None = None
) -> tuple[dict[str, Any], Metadata]:
    """The manifest of the step-N ``folder`` and its index of tensors, after a look at the files.

    ``verify`` compares every file with its hash, as loading into a model does. Of ``ranks`` each does so
    with its share and the index, and must hear of the others' errors before it goes on.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, altered or unsafe.
    """
    manifest = read_manifest(folder)
    files: Mapping[str, dict[str, Any]] = manifest["files"]
    hashed = set(files if ranks is None else [METADATA, *share(files, ranks)]) if verify else set()
    with ThreadPoolExecutor(cores()) as threads:
        one_by_one = [
            threads.submit(check_files, folder, {name: entry}, verify=name in hashed)
            for name, entry in files.items()
        ]
        found = [checked.result() for checked in one_by_one]
    if problems := [problem for of_file in found for problem in of_file]:
        raise CheckpointError(f"{folder} cannot be read: {first_few(problems, 4)}\n  fix:  {ADVICE}")
    return manifest, read_metadata(folder, files)


def pieces(folder: Path, metadata: Metadata, name: str) -> list[TensorPiece]:
    """The pieces of which the tensor ``name`` consists, from a vetted index; reads no weight.

    Raises:
        CheckpointError: a piece is damaged.
    """
    return [
        TensorPiece(tensor_place(folder, metadata, name, number), tuple(chunk.offsets))
        for number, chunk in enumerate(tensors_of(metadata)[name].chunks)
    ]


def index_problems(folder: Path, files: Mapping[str, dict[str, Any]]) -> list[str]:
    """List what is wrong with the index of the checkpoint in ``folder`` and with the pieces it tells of."""
    try:
        metadata = read_metadata(folder, files)
        for name in tensors_of(metadata):
            pieces(folder, metadata, name)
    except CheckpointError as error:
        return [str(error)]
    return []


def read_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """The tensor ``name``, whole, by a vetted index."""
    entry = tensors_of(metadata)[name]
    return read_pieces(pieces(folder, metadata, name), tuple(entry.size), entry.properties.dtype)


def read_pieces(
    parts: Sequence[TensorPiece],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    region: Region | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A tensor, or a ``region`` of it, joined from its ``parts``; in ``out``, contiguous, if it is given.

    Raises:
        DataError: a file cannot be read or ends too early.
    """
    region = whole(shape) if region is None else region
    out = new_output(shape, dtype, region, out)
    for piece in parts:
        bounds = [
            (max(cut.start, start), min(cut.stop, start + size))
            for cut, start, size in zip(region, piece.offsets, piece.place.shape, strict=True)
        ]
        if any(start >= stop for start, stop in bounds):
            continue
        inside = [slice(a - o, b - o) for (a, b), o in zip(bounds, piece.offsets, strict=True)]
        target = out[tuple(slice(a - c.start, b - c.start) for (a, b), c in zip(bounds, region, strict=True))]
        part = target if target.is_contiguous() else torch.empty(target.shape, dtype=dtype)
        read_region(piece.place, inside, part)
        if part is not target:
            target.copy_(part)
    return out
