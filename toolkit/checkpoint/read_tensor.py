"""Read tensors, or regions of them, from a checkpoint without a process group or a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import METADATA, locate_tensor, read_metadata, tensor_entries
from toolkit.checkpoint.load import files_to_verify
from toolkit.checkpoint.manifest import ADVICE, check_files, read_manifest
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, first_few
from toolkit.hardware import cores
from toolkit.io.tensor_file import Region, TensorPlace, new_output, read_region, whole


@dataclass(frozen=True)
class SavedChunk:
    """The chunk of a tensor saved by one rank: a box at ``offsets``."""

    place: TensorPlace
    offsets: tuple[int, ...]


def open_checkpoint(
    folder: Path, *, verify: bool = True, ranks: Ranks | None = None
) -> tuple[dict[str, Any], Metadata]:
    """Check the files of the step-N ``folder``, and return its manifest and its index of tensors.

    ``verify`` checks the hash of every file. With ``ranks``, each rank verifies the index and its share of
    the files, and the caller must exchange errors.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, altered or unsafe.
    """
    manifest = read_manifest(folder)
    files: Mapping[str, dict[str, Any]] = manifest["files"]
    hashed = set(files if ranks is None else [METADATA, *files_to_verify(files, ranks)]) if verify else set()
    with ThreadPoolExecutor(cores()) as threads:
        futures = [
            threads.submit(check_files, folder, {name: entry}, verify=name in hashed)
            for name, entry in files.items()
        ]
        problems = [problem for future in futures for problem in future.result()]
    if problems:
        raise CheckpointError(f"{folder} cannot be read: {first_few(problems, 4)}\n  fix:  {ADVICE}")
    return manifest, read_metadata(folder, files)


def saved_chunks(folder: Path, metadata: Metadata, name: str) -> list[SavedChunk]:
    """Locate the chunks of the tensor ``name`` in a validated index, without reading their elements.

    Raises:
        CheckpointError: a chunk is damaged.
    """
    return [
        SavedChunk(locate_tensor(folder, metadata, name, number), tuple(chunk.offsets))
        for number, chunk in enumerate(tensor_entries(metadata)[name].chunks)
    ]


def index_problems(folder: Path, files: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the problems of the index of the checkpoint in ``folder``, and of its chunks."""
    try:
        metadata = read_metadata(folder, files)
        for name in tensor_entries(metadata):
            saved_chunks(folder, metadata, name)
    except CheckpointError as error:
        return [str(error)]
    return []


def read_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    """Read the full tensor ``name``, located by a validated index."""
    entry = tensor_entries(metadata)[name]
    return read_chunks(saved_chunks(folder, metadata, name), tuple(entry.size), entry.properties.dtype)


def read_chunks(
    chunks: Sequence[SavedChunk],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    region: Region | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Read a tensor, or a ``region`` of it, from its ``chunks``, into the contiguous ``out`` if given.

    Raises:
        DataError: a file cannot be read or ends too early.
    """
    region = whole(shape) if region is None else region
    out = new_output(shape, dtype, region, out)
    for chunk in chunks:
        bounds = [
            (max(wanted.start, start), min(wanted.stop, start + size))
            for wanted, start, size in zip(region, chunk.offsets, chunk.place.shape, strict=True)
        ]
        if any(start >= stop for start, stop in bounds):
            continue
        inside = [slice(a - o, b - o) for (a, b), o in zip(bounds, chunk.offsets, strict=True)]
        target = out[tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(bounds, region, strict=True))]
        buffer = target if target.is_contiguous() else torch.empty(target.shape, dtype=dtype)
        read_region(chunk.place, inside, buffer)
        if buffer is not target:
            target.copy_(buffer)
    return out
