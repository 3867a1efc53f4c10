"""Single tensors of a checkpoint, or regions of them, read in a process without a group and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from toolkit.checkpoint.manifest import ADVICE, check_files, read_manifest
from toolkit.checkpoint.storage import VerifiedReader, read_metadata, tensors_of
from toolkit.errors import CheckpointError
from toolkit.hardware import cores
from toolkit.wording import first_few


class CheckpointTensors:
    """The tensors of the checkpoint in ``folder`` (a step-N), by name. Several threads may read at once.

    ``verify`` compares every file with its SHA-256 first, as loading into a model does.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, altered or unsafe.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        self.place = folder
        self.manifest: dict[str, Any] = read_manifest(folder)
        files = self.manifest["files"]
        with ThreadPoolExecutor(cores()) as threads:
            one_by_one = [{name: entry} for name, entry in files.items()]
            found = list(threads.map(lambda file: check_files(folder, file, verify=verify), one_by_one))
        if problems := [problem for of_file in found for problem in of_file]:
            said = first_few(problems, 4)
            raise CheckpointError(f"{folder} cannot be read: {said}\n  fix:  {ADVICE}")
        metadata = read_metadata(folder, files)
        self.tensors: Mapping[str, TensorStorageMetadata] = tensors_of(metadata)
        self._reader = VerifiedReader(folder, metadata)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def read(self, name: str, region: Sequence[slice] | None = None, out: Tensor | None = None) -> Tensor:
        """The tensor ``name``, or a ``region`` of it, on the CPU in its stored dtype; into ``out`` if given.

        A piece that one rank has saved is read whole, also where the region cuts it.

        Raises:
            CheckpointError: the pieces cannot be read.
        """
        entry = self.tensors[name]
        region = [slice(0, size) for size in entry.size] if region is None else region
        offsets = torch.Size(cut.start for cut in region)
        sizes = torch.Size(cut.stop - cut.start for cut in region)
        if out is None:
            out = torch.empty(sizes, dtype=entry.properties.dtype)
        assert out.shape == sizes and out.dtype == entry.properties.dtype
        items = create_read_items_for_chunk_list(name, entry, [ChunkStorageMetadata(offsets, sizes)])
        try:
            self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        except Exception as error:  # a damaged piece raises nearly anything
            raise CheckpointError(f"{name} of {self.place} cannot be read: {error}") from error
        return out


class _Into(DefaultLoadPlanner):
    """Puts what is read where it belongs in one tensor."""

    def __init__(self, out: Tensor):
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._out
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
