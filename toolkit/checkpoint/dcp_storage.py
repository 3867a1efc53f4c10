"""DCP file storage that hashes its files, commits atomically, and reads without executing code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from toolkit.checkpoint.coverage import coverage_problem
from toolkit.checkpoint.manifest import ADVICE, HASH, new_hash
from toolkit.compat import StorageInfo
from toolkit.config.local_paths import open_regular
from toolkit.errors import CheckpointError, DataError
from toolkit.io.pickles import PlainUnpickler
from toolkit.io.tensor_file import FilePart, SavedFile, TensorPlace, read_region

METADATA = ".metadata"
_MAX_DIMENSIONS = 8
_PROPERTIES = 5
"""Number of tensor properties in a ``.metadata``, without the strides."""
_CHUNK = 4 << 20
"""Number of bytes to hash, then write while they are still in the CPU cache."""
Files = dict[str, dict[str, Any]]


class _HashingStream:
    """A binary file that hashes and counts the bytes written to it."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._hash = new_hash()
        self._bytes = 0
        self.failure: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        for start in range(0, len(rest), _CHUNK):
            chunk = rest[start : start + _CHUNK]
            self._hash.update(chunk)
            try:
                self._file.write(chunk)
            except (OSError, DataError) as error:
                self.failure = error
                raise
        self._bytes += len(rest)
        return len(rest)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:  # without it DCP calls os.sync(), which flushes all file systems
        self._file.flush()  # DCP calls fileno() to sync the file, without flushing it first
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def entry(self) -> dict[str, Any]:
        return {"bytes": self._bytes, HASH: self._hash.hexdigest()}


class HashingFileSystem(FileSystem):
    """Records size and hash of each written file in ``written``, by name."""

    def __init__(self) -> None:
        self.written: Files = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with path.open(mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _HashingStream(file)
            try:
                yield stream
            except RuntimeError as error:  # torch's zip writer reports a wrong position if the disk is full
                raise stream.failure or error from error
        self.written[path.name] = stream.entry()


class RemoteFileSystem(HashingFileSystem):
    """Writes files under their final names, without DCP's renaming of temporary files."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        final = path.with_name(path.name.removesuffix(".tmp"))
        with super().create_stream(final, mode) as stream:
            yield stream
        self.written[path.name] = self.written[final.name]

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        pass

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        pass


class ContiguousSavePlanner(DefaultSavePlanner):
    """Saves a flat state dict of tensors and makes each of them contiguous."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        return object.contiguous()


class WriteResults(list[WriteResult]):
    """A rank's write results for DCP, with the rank's files attached."""

    files: Files


class CommittingWriter(FileSystemWriter):
    """Writes into ``folder`` and calls ``commit(files, metadata)`` on rank 0 once all ranks have synced.

    ``files`` maps the names of all ranks' files to size and hash. DCP propagates exceptions of ``commit`` to
    every rank. ``commit`` runs inside DCP's ``finish``, also in a background save.
    """

    def __init__(self, folder: Path, commit: Callable[[Files, Metadata], None]):
        local = isinstance(folder, Path)
        super().__init__("", sync_files=local)
        self.path = folder
        self._hashing = HashingFileSystem() if local else RemoteFileSystem()
        self.fs = self._hashing
        self._commit = commit

    def storage_meta(self) -> StorageMeta:
        # DCP would pickle the folder's path, which is wrong after the commit.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = WriteResults(super().write_data(plan, planner).value())
        results.files = self._hashing.written
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {METADATA: self._hashing.written[f"{METADATA}.tmp"]}
        for per_rank in results:
            assert isinstance(per_rank, WriteResults)
            files |= {name: entry for name, entry in per_rank.files.items() if not name.startswith(METADATA)}
        self._commit(files, metadata)


# The classes in a .metadata of tensors. Constructing them executes no code from the file.
_DTYPES = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch", name) for name in _DTYPES),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def _enum_member(kind: Any, name: str) -> Any:
    """Stand in for ``getattr`` in a pickle; Python 3.11.0 to 3.11.3 use it to write enum members."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise CheckpointError("it refers to builtins.getattr, which no checkpoint of tensors needs")
    return kind[name]


class _MetadataUnpickler(PlainUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in _ALLOWED:
            raise CheckpointError(f"it refers to {module}.{name}, which no checkpoint of tensors needs")
        return super().find_class(module, name)

    def is_plain(self, key: Any) -> bool:
        if type(key) is not MetadataIndex:
            return type(key) is str
        plain = type(key.fqn) is str and type(key.offset) in (torch.Size, type(None))
        return plain and type(key.index) in (int, type(None))

    def load_build(self) -> None:
        # torch 2.15 adds strides, which older releases reject and reading does not need.
        if isinstance(self.stack[-2], TensorProperties):
            properties = self.stack[-1]
            if len(properties) not in (_PROPERTIES, _PROPERTIES + 1):
                rule = f"torch 2.11 to 2.14 write {_PROPERTIES} properties per tensor, and 2.15 one more"
                fix = "load it with the torch that wrote it, or update the toolkit"
                raise CheckpointError(f"{rule}; this file has {len(properties)}: {fix}")
            self.stack[-1] = properties[:_PROPERTIES]
        super().load_build()

    dispatch = PlainUnpickler.dispatch | {pickle.BUILD[0]: load_build}


def read_metadata(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Metadata:
    """Read DCP's index of the checkpoint in ``folder`` without executing code from it.

    Raises:
            CheckpointError: it contains anything except plain tensor metadata, has items that are not tensors
                and would be unpickled on loading, refers to files outside the manifest's ``files``, or does
                not cover each tensor exactly.
    """
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            metadata = _MetadataUnpickler(file).load()
        problem = _metadata_problem(metadata, files)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is rejected: {error}") from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if problem:
        raise CheckpointError(f"{path} is rejected: {problem}")
    return metadata


def _metadata_problem(metadata: Any, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    if not isinstance(metadata, Metadata) or not all(
        isinstance(field, dict) for field in (metadata.storage_data, metadata.state_dict_metadata)
    ):
        return "it is not the index of a checkpoint"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not a tensor but a pickled object, which could execute code"
        sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
        if not all(type(size) is torch.Size and len(size) <= _MAX_DIMENSIONS for size in sizes):
            return f"{name} has an invalid shape"
    for index, stored in metadata.storage_data.items():
        if not isinstance(stored, StorageInfo) or type(stored.relative_path) is not str:
            return f"{index.fqn} has an invalid location"
        if stored.relative_path not in files:
            return f"{index.fqn} is outside the files of the manifest"
        if stored.transform_descriptors:
            return f"{index.fqn} is stored with a transform, which this toolkit never writes"
        if {type(stored.offset), type(stored.length)} != {int}:
            return f"{index.fqn} has an invalid location"
        if not 0 <= stored.offset <= stored.offset + stored.length <= files[stored.relative_path]["bytes"]:
            return f"{index.fqn} is outside {stored.relative_path}"
    return coverage_problem(tensor_entries(metadata), metadata.storage_data)


def tensor_entries(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a validated index, by name."""
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def locate_tensor(
    folder: Path, metadata: Metadata, name: str, number: int, file: Path | None = None
) -> TensorPlace:
    """Locate the elements of a chunk of the tensor ``name`` in a validated index, without reading them.
    ``file`` overrides the index's file.

    Raises:
            CheckpointError: there is no such tensor, or it is not contiguous.
    """
    entry = tensor_entries(metadata)[name]
    chunk = entry.chunks[number]
    stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
    file = file or folder / stored.relative_path
    try:
        with open_regular(file) as stream:
            part = io.BufferedReader(FilePart(stream, stored.offset, stored.length))
            saved = SavedFile(file, part, begin=stored.offset)
            place = saved.place(saved.load())
    except Exception as error:  # a damaged file can raise almost anything
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if place.shape != tuple(chunk.sizes) or place.dtype != entry.properties.dtype:
        raise CheckpointError(f"{name} in {file} does not match the chunk in the index; {ADVICE}")
    return place


class VerifiedReader(FileSystemReader):
    """Reads tensors directly into their destination; DCP would make two copies. The index has been validated
    by :func:`read_metadata`."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__("")  # DCP's own reading is overridden
        self.folder = folder
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            self.read_item(item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_item(self, item: ReadItem, planner: LoadPlanner) -> None:
        place = self.place(item.storage_index)
        corner = zip(item.storage_offsets, item.lengths, strict=True)
        region = [slice(start, start + size) for start, size in corner]
        target = planner.resolve_tensor(item).detach()
        if target.is_cpu and target.is_contiguous() and target.dtype == place.dtype:
            read_region(place, region, target)
        else:
            target.copy_(read_region(place, region, torch.empty(item.lengths, dtype=place.dtype)))
        planner.commit_tensor(item, target)

    def place(self, index: MetadataIndex) -> TensorPlace:
        """Locate a chunk like :func:`locate_tensor`."""
        assert index.index is not None, "the planner numbers the chunks"
        return locate_tensor(self.folder, self.metadata, index.fqn, index.index)
