"""Write weight folders one file at a time, in a work folder that is renamed when complete.

Each rank writes entire files, so that ranks share nothing but a file system. If the process is killed, the
same call resumes after the last finished file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.locks import exclusive_lock
from toolkit.io.work_folder import file_state, reject_existing, replace_folder, work_folder, write_in_progress
from toolkit.weights.source import WeightSource
from toolkit.weights.views import source_paths

Progress = Callable[[int], object]
"""Function called with the number of bytes written or skipped."""


def no_progress(count: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Folder:
    """Contents of a folder to be written.

    Attributes:
        files: tensors (our names) of each weight file.
        others: contents of other files.
        write: writes the tensors of one file to a path.
        open: opens the folder for reading.
    """

    files: Mapping[str, Sequence[str]]
    others: Mapping[str, bytes]
    write: Callable[[Path, Sequence[str]], None]
    open: Callable[[Path], WeightSource]


def write_folder(
    source: WeightSource,
    out: Path,
    folder: Folder,
    *,
    ranks: Ranks,
    progress: Progress,
    check: Callable[[WeightSource], None] | None = None,
    replace: bool = False,
) -> None:
    """Write ``folder`` to ``out`` from ``source``; each of ``ranks`` writes some of the files.

    ``progress`` is called here only for files that already exist. ``check`` is called with the written
    weights before the rename. With ``replace``, an existing ``out`` is replaced when the new folder is
    complete.

    Raises:
        CheckpointError: it cannot be written; finished files are kept, and the same call resumes after them.
        DataError, CheckpointError: the source is damaged, or ``check`` failed; the output is removed.
        DataError: ``out`` exists and ``replace`` is False, or another process is writing it.
    """
    with ExitStack() as locks:  # of rank 0
        work = ranks.on_rank_0(partial(_begin, source, out, folder, replace, locks))
        source_errors, write_errors = _write_files(source, work, folder, ranks, progress)
        failures = ranks.gather_problems(source_errors)
        if failures:
            ranks.on_rank_0(lambda: shutil.rmtree(work, ignore_errors=True))
            raise DataError("\n  ".join(failures))
        failures = ranks.gather_problems(write_errors)
        if failures:
            raise CheckpointError(
                f"{out} could not be written: {'; '.join(failures)}\n"
                f"  Finished files are kept in {work}: run the same command again to resume."
            )
        ranks.on_rank_0(partial(_finish, work, out, folder, check, replace))


def _begin(source: WeightSource, out: Path, folder: Folder, replace: bool, locks: ExitStack) -> Path:
    plan = [
        [(str(path.resolve()), file_state(path)) for path in source_paths(source)],
        [(file, *tensors) for file, tensors in folder.files.items()],
        [(name, str(stored)) for name, stored in source.tensors.items()],
    ]
    work = work_folder(out, plan)
    try:
        locks.enter_context(exclusive_lock(out.with_name(f"{out.name}.lock")))
        if not replace:
            reject_existing(out)
        work.mkdir(parents=True, exist_ok=True)
    except BlockingIOError as error:
        raise write_in_progress(out, error) from None
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return work


def _write_files(
    source: WeightSource, work: Path, folder: Folder, ranks: Ranks, progress: Progress
) -> tuple[list[str], list[str]]:
    """Write this rank's files. Returns read errors of the source and write errors."""
    try:
        for name in list(folder.files)[ranks.rank :: ranks.size]:
            if (work / name).exists():
                progress(sum(source.tensors[tensor].nbytes for tensor in folder.files[name]))
                continue
            part = work / f"{name}.part"
            folder.write(part, folder.files[name])
            with part.open("rb+") as file:
                sync_file(file)
            part.rename(work / name)
    except (DataError, CheckpointError) as error:
        return [str(error)], []
    except OSError as error:
        return [], [f"rank {ranks.rank}: {error.strerror or error}"]
    except SafetensorError as error:
        return [], [f"rank {ranks.rank}: {error}"]
    return [], []


def _finish(
    work: Path, out: Path, folder: Folder, check: Callable[[WeightSource], None] | None, replace: bool
) -> None:
    try:
        for path in work.iterdir():  # remove other files of an interrupted attempt
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in {*folder.files, *folder.others}:
                path.unlink()
        for name, content in folder.others.items():
            (work / name).parent.mkdir(exist_ok=True)
            with (work / name).open("wb") as file:
                file.write(content)
                sync_file(file)
        if check:
            try:
                check(folder.open(work))
            except (DataError, CheckpointError):
                shutil.rmtree(work, ignore_errors=True)
                raise
        if not replace:
            reject_existing(out)  # it may have been created in the meantime
        sync_folder(work)
        replace_folder(work, out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror}: {error.filename}") from error
