"""Writes folders of weights whose files have a known layout: sized first, then filled block by block.

Several threads, and several ranks with whole files each, fill them from a source. No tensor is in memory
whole, and a process that is killed is gone on with from the last block that is on the disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.locks import claimed
from toolkit.io.row_blocks import block_threads, row_blocks, rows_of
from toolkit.io.work_folder import (
    Done,
    finish,
    in_progress,
    refuse_existing,
    state_of,
    work_folder,
    write_file,
)
from toolkit.weights.source import WeightSource

BLOCK_BYTES = 64 << 20
_MADE = "made"


@dataclass(frozen=True)
class File:
    """A file to be, of ``tensors`` (our names): ``make`` gives it its full size and all but their bytes,
    and ``begins`` then tells where those of each begin."""

    name: str
    tensors: Sequence[str]
    make: Callable[[Path], None]
    begins: Callable[[Path], Mapping[str, int]]


@dataclass(frozen=True)
class Folder:
    """A folder to be: files of weights, and others of which the content is there."""

    files: Sequence[File]
    others: Mapping[str, bytes]
    opened: Callable[[Path], WeightSource]
    arrange: Callable[[str, Tensor], Tensor]
    """A block of rows of a tensor in the order that the files have."""
    head_rows: Callable[[str], int]
    """Rows that a block must not part, 1 where any cut will do."""


def write_folder(
    source: WeightSource,
    out: Path,
    folder: Folder,
    *,
    ranks: Ranks,
    progress: Callable[[int], None] | None = None,
    check: Callable[[WeightSource], None] | None = None,
    replace: bool = False,
) -> None:
    """Make ``folder`` at ``out`` from ``source``; each of ``ranks`` writes its share of the files.

    ``progress`` is told bytes as they are done. ``check`` sees what was written before it has its name.
    With ``replace``, what is at ``out`` already goes when the new one is whole.

    Raises:
        CheckpointError: it cannot be written; what is written stays, and the same call goes on with it.
        DataError, CheckpointError: the source is damaged, or ``check`` has failed; nothing is left.
        DataError: something is at ``out`` that is not to be replaced, or another process is writing it; it
            stays.
    """
    with ExitStack() as held:  # by rank 0
        work = ranks.on_rank_0(partial(_begin, source, out, folder, replace, held))
        broken, full = _share(source, work, folder, ranks, progress)
        failures = ranks.gather_problems(broken)
        if failures:
            ranks.on_rank_0(lambda: shutil.rmtree(work, ignore_errors=True))
            raise DataError("\n  ".join(failures))
        unwritten = ranks.gather_problems(full)
        if unwritten:
            raise CheckpointError(
                f"{out} could not be written: {'; '.join(unwritten)}\n"
                f"  What is written stays in {work}: the same again goes on from there."
            )
        ranks.on_rank_0(partial(_end, work, out, folder, check, replace))


def _begin(source: WeightSource, out: Path, folder: Folder, replace: bool, held: ExitStack) -> Path:
    try:
        held.enter_context(claimed(out.with_name(f"{out.name}.lock")))
    except BlockingIOError as error:
        raise in_progress(out, error) from None
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    if not replace:
        refuse_existing(out)
    plan = [
        str(source.place.resolve()),
        state_of(source.place),
        [(file.name, *file.tensors) for file in folder.files],
        [(name, str(stored)) for name, stored in source.tensors.items()],
    ]
    work = work_folder(out, plan)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return work


def _share(
    source: WeightSource, work: Path, folder: Folder, ranks: Ranks, progress: Callable[[int], None] | None
) -> tuple[list[str], list[str]]:
    """Fill this rank's files; what is wrong with the source, and what with the disk."""
    try:
        for file in folder.files[ranks.rank :: ranks.size]:
            _fill(source, work, file, folder, progress or (lambda count: None))
    except (DataError, CheckpointError) as error:
        return [str(error)], []
    except OSError as error:
        return [], [f"rank {ranks.rank}: {error.strerror or error}"]
    return [], []


def _fill(
    source: WeightSource, work: Path, file: File, folder: Folder, progress: Callable[[int], None]
) -> None:
    done, path = Done(work, file.name), work / file.name
    if _MADE not in done.parts:
        file.make(path)
        with path.open("rb+") as made:
            sync_file(made)
        sync_folder(work)
        done.add(_MADE)
    descriptor = os.open(path, os.O_WRONLY)

    def one(name: str, rows: slice, begin: int) -> None:
        stored = source.tensors[name]
        part = f"{name} {rows.start}"
        if part not in done.parts:
            block = source.read(name, rows_of(rows, stored.shape))
            _write(descriptor, begin, folder.arrange(name, block))
            os.fdatasync(descriptor)
            done.add(part)

    try:
        with ThreadPoolExecutor(block_threads(BLOCK_BYTES)) as pool:
            running = []
            for name, begin in file.begins(path).items():
                stored = source.tensors[name]
                row = stored.dtype.itemsize * _columns(stored.shape)
                blocks = row_blocks(
                    stored.shape, stored.dtype.itemsize, limit=BLOCK_BYTES, multiple=folder.head_rows(name)
                )
                for rows in blocks:
                    size = (rows.stop - rows.start) * row
                    running.append((pool.submit(one, name, rows, begin + rows.start * row), size))
            try:
                for block, size in running:
                    block.result()
                    progress(size)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        os.close(descriptor)
        done.close()


def _columns(shape: Sequence[int]) -> int:
    return torch.Size(shape[1:]).numel()


def _write(descriptor: int, begin: int, block: Tensor) -> None:
    memory = memoryview(block.contiguous().view(-1).view(torch.uint8).numpy().data)
    written = 0
    while written < len(memory):
        written += os.pwrite(descriptor, memory[written:], begin + written)


def _end(
    work: Path, out: Path, folder: Folder, check: Callable[[WeightSource], None] | None, replace: bool
) -> None:
    try:
        for name, content in folder.others.items():
            write_file(work / name, content)
        if check:
            try:
                check(folder.opened(work))
            except (DataError, CheckpointError):
                shutil.rmtree(work, ignore_errors=True)
                raise
        if not replace:
            refuse_existing(out)  # it may have come up meanwhile
        finish(work, out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror}: {error.filename}") from error
