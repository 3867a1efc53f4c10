"""Writes folders of weights a file at a time, in a work folder that gets its name when it is whole.

The ranks of ``ranks`` write whole files each, so that they need share no more than a file system. A process
that is killed is gone on with from the last file that it finished.
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
from toolkit.io.locks import claimed
from toolkit.io.work_folder import in_progress, refuse_existing, state_of, take_place, work_folder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import places

Progress = Callable[[int], None]
"""Is told bytes as they are done."""


def no_progress(count: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Folder:
    """A folder to be: files of weights with the tensors (our names) of each, and others of which the content
    is there. ``write`` writes the tensors of one file to a path; ``opened`` reads the folder back."""

    files: Mapping[str, Sequence[str]]
    others: Mapping[str, bytes]
    write: Callable[[Path, Sequence[str]], None]
    opened: Callable[[Path], WeightSource]


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
    """Make ``folder`` at ``out`` from ``source``; each of ``ranks`` writes its share of the files.

    ``progress`` is told here of files that are there already. ``check`` sees what was written before it has
    its name. With ``replace``, what is at ``out`` already goes when the new one is whole.

    Raises:
        CheckpointError: it cannot be written; finished files stay, and the same call goes on with them.
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
                f"  Whole files stay in {work}: the same again goes on from there."
            )
        ranks.on_rank_0(partial(_end, work, out, folder, check, replace))


def _begin(source: WeightSource, out: Path, folder: Folder, replace: bool, held: ExitStack) -> Path:
    plan = [
        [(str(place.resolve()), state_of(place)) for place in places(source)],
        [(file, *tensors) for file, tensors in folder.files.items()],
        [(name, str(stored)) for name, stored in source.tensors.items()],
    ]
    work = work_folder(out, plan)
    try:
        held.enter_context(claimed(out.with_name(f"{out.name}.lock")))
        if not replace:
            refuse_existing(out)
        work.mkdir(parents=True, exist_ok=True)
    except BlockingIOError as error:
        raise in_progress(out, error) from None
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}: {error.filename}") from None
    return work


def _share(
    source: WeightSource, work: Path, folder: Folder, ranks: Ranks, progress: Progress
) -> tuple[list[str], list[str]]:
    """Write this rank's files; what is wrong with the source, and what with the disk."""
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


def _end(
    work: Path, out: Path, folder: Folder, check: Callable[[WeightSource], None] | None, replace: bool
) -> None:
    try:
        for path in work.iterdir():  # of a try that was stopped, whose companions may have been others
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
                check(folder.opened(work))
            except (DataError, CheckpointError):
                shutil.rmtree(work, ignore_errors=True)
                raise
        if not replace:
            refuse_existing(out)  # it may have come up meanwhile
        sync_folder(work)
        take_place(work, out)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror}: {error.filename}") from error
