"""Writes a checkpoint of tensors that are read as they are written: never the model in memory.

The files hold about 1 GiB each, of pieces of whole rows, and several threads write them. The commit is that
of a run's saves: hashes, manifest, one rename. A writer that is killed leaves a ``step-N.tmp-`` folder, which
the same call goes on with from the last whole file, and which the start of a run in that folder removes.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from toolkit.checkpoint.dcp_storage import CommittingWriter, Files, Results, read_metadata
from toolkit.checkpoint.manager import commit_folder, without_crc32
from toolkit.checkpoint.manifest import build_manifest, step_folder
from toolkit.errors import CheckpointError
from toolkit.io.locks import LOCK, claimed
from toolkit.io.row_blocks import block_threads, row_blocks
from toolkit.io.work_folder import Done, forget_parts, in_progress, refuse_existing, work_folder

FILE_BYTES = 1 << 30
PIECE_BYTES = 128 << 20


@dataclass(frozen=True)
class Pending:
    """A tensor to be written; ``read`` gives some of its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice], Tensor]


@dataclass(frozen=True)
class _Piece:
    name: str
    rows: slice
    tensor: Pending

    @property
    def offsets(self) -> torch.Size:
        return torch.Size((self.rows.start, *(0 for _ in self.tensor.shape[1:])))

    @property
    def sizes(self) -> torch.Size:
        return torch.Size((self.rows.stop - self.rows.start, *self.tensor.shape[1:]))

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.tensor.dtype.itemsize


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Pending],
    run: Mapping[str, Any],
    *,
    plan: object,
    progress: Callable[[int], None] | None = None,
    check: Callable[[Path, Metadata], None] | None = None,
) -> Path:
    """Write ``tensors`` as ``step-N`` in ``folder``, with ``run`` (JSON types) in the manifest.

    ``plan`` (JSON types) tells what the tensors come from: what was written by the same plan is gone on with.
    ``progress`` is told bytes as they are done. ``check`` sees what was written before it is committed.

    Raises:
        DataError: there is such a step already, or another process is writing in ``folder``; both stay.
        CheckpointError: it cannot be written; what is written stays, and the same call goes on with it.
        ToolkitError: a tensor cannot be read, or ``check`` has failed; nothing is left.
    """
    final = step_folder(folder, step)
    work = work_folder(
        final, [plan, [(name, tuple(it.shape), str(it.dtype)) for name, it in tensors.items()]]
    )
    metadata = _index(tensors)
    sizes = [math.prod(it.shape) * it.dtype.itemsize for it in tensors.values()]

    def commit(files: Files, _: Metadata) -> None:
        if check:
            check(work, read_metadata(work, files))
        forget_parts(work)
        manifest = build_manifest(
            step=step, files=files, tensor_count=len(sizes), tensor_bytes=sum(sizes), run=dict(run)
        )
        commit_folder(work, final, manifest)

    try:
        with claimed(folder / LOCK):  # that of a run which saves there
            refuse_existing(final)
            try:
                work.mkdir(exist_ok=True)
                writer = CommittingWriter(work, commit)
                results = _write_files(writer, work, tensors, progress or (lambda count: None))
                writer.finish(metadata, [results])
            except Exception as error:
                if not isinstance(error, OSError):
                    shutil.rmtree(work, ignore_errors=True)
                raise
    except BlockingIOError as error:
        raise in_progress(final, error) from None
    except OSError as error:
        raise CheckpointError(
            f"{final} could not be written: {error.strerror or error}\n"
            f"  What is written stays in {work}: the same again goes on from there."
        ) from error
    except Exception:
        with suppress(OSError):  # others may have something there
            folder.rmdir()
        raise
    return final


def _pieces(name: str, tensor: Pending) -> list[_Piece]:
    blocks = row_blocks(tensor.shape, tensor.dtype.itemsize, limit=PIECE_BYTES)
    return [_Piece(name, rows, tensor) for rows in blocks]


def _index(tensors: Mapping[str, Pending]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(piece.offsets, piece.sizes) for piece in _pieces(name, tensor)],
            )
            for name, tensor in tensors.items()
        }
    )


def _files(tensors: Mapping[str, Pending]) -> dict[str, list[_Piece]]:
    """The pieces of each file; a file is full before the next begins."""
    groups: list[list[_Piece]] = [[]]
    for name, tensor in tensors.items():
        for piece in _pieces(name, tensor):
            if groups[-1] and sum(it.bytes for it in groups[-1]) + piece.bytes > FILE_BYTES:
                groups.append([])
            groups[-1].append(piece)
    return {f"__{number}_0.distcp": group for number, group in enumerate(groups)}


def _write_files(
    writer: CommittingWriter, work: Path, tensors: Mapping[str, Pending], progress: Callable[[int], None]
) -> Results:
    done, files, hashing = Done(work, "files"), _files(tensors), cast(Any, writer.fs)
    results = Results()
    results.files = {}

    def one(file: str) -> dict[str, Any]:
        if file in done.parts:
            progress(sum(piece.bytes for piece in files[file]))
        else:
            places = _write_file(hashing, work / file, files[file], progress)
            done.add(file, {"places": places, "entry": hashing.written[file]})
        return done.parts[file]

    with without_crc32(), ThreadPoolExecutor(block_threads(PIECE_BYTES)) as pool:
        running = [pool.submit(one, file) for file in files]
        try:
            written = [future.result() for future in running]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    done.close()
    for (file, group), about in zip(files.items(), written, strict=True):
        results.files[file] = about["entry"]
        for piece, (offset, length) in zip(group, about["places"], strict=True):
            index = MetadataIndex(piece.name, piece.offsets)
            results.append(WriteResult(index, length, _StorageInfo(file, offset, length)))
    return results


def _write_file(
    hashing: Any, path: Path, group: Sequence[_Piece], progress: Callable[[int], None]
) -> list[tuple[int, int]]:
    """Where each piece lies in the file, and its length there."""
    places = []
    with hashing.create_stream(path, "wb") as stream:
        for piece in group:
            offset = stream.tell()
            torch.save(piece.tensor.read(piece.rows), stream)
            places.append((offset, stream.tell() - offset))
            progress(piece.bytes)
        os.fsync(stream.fileno())
    return places
