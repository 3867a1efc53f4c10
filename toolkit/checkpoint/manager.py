"""Saves, finds, loads and retires the checkpoints of a run.

A save writes DCP shards into ``step-N.tmp-<id>``, hashed on the way, syncs them, adds the manifest and
commits by one rename. Killed anywhere, it leaves either the previous state or the new one, and a
``.tmp-`` folder that the next start removes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.async_save import Background
from toolkit.checkpoint.dcp_storage import CommittingWriter, Files, RowByRow, tensors_of
from toolkit.checkpoint.load import load_tensors
from toolkit.checkpoint.manifest import (
    build_manifest,
    committed_steps,
    read_manifest,
    step_folder,
    unsound_steps,
)
from toolkit.checkpoint.retention import steps_in, superseded
from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError


class CheckpointManager:
    """The checkpoints in ``folder``, seen alike by all ranks of ``group`` (default: all).

    Every method is collective: all ranks call it, with the same arguments but for the tensors, which
    are each rank's own. ``keep_latest_k`` is how many committed checkpoints are kept, 0 for all; those of
    steps that ``keep_every_n`` divides stay beside them, and so do those of the steps ``best`` and ``start``,
    to which each start of the run goes back. With ``background``, saves are written while the caller goes
    on, and the group is one that nobody else uses.
    ``say`` takes one line of text for the user; rank 0 calls it. Tensors may be DTensors of any mesh; the
    group must carry CPU tensors (gloo).

    Attributes:
        saved: steps whose checkpoints this manager has committed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_latest_k: int = 0,
        keep_every_n: int | None = None,
        start: int | None = None,
        background: Background | None = None,
        group: dist.ProcessGroup | None = None,
        say: Callable[[str], None] = print,
    ):
        self.folder = expand_user(folder)
        self.keep_latest_k = keep_latest_k
        self.keep_every_n = keep_every_n
        self.best: int | None = None
        self.start = start
        self.saved: set[int] = set()
        self.background = background
        self.group = group
        self.say = say
        self.ranks = Ranks(group)
        assert not (background and self.ranks.size > 1 and group is None), "the caller uses the default group"

    def latest(self) -> int | None:
        """The newest committed step, or None; rank 0's view of the file system decides.

        What looks newer but is no checkpoint is told.
        """
        self.end_save(wait=True)
        return self.ranks.on_rank_0(self._latest)

    def _latest(self) -> int | None:
        newest = max(committed_steps(self.folder), default=None)
        for step, reason in sorted(unsound_steps(self.folder).items()):
            if newest is None or step > newest:
                self.say(f"checkpoint: passed over step-{step}: {reason}")
        return newest

    def save(self, step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> Path:
        """Write ``tensors`` under flat names, with ``run`` (JSON types) in the manifest, as ``step-N``.

        A committed checkpoint of the same step is replaced: after a rewind, what is written last is
        what counts. Then the oldest that need not be kept are deleted. Returns the folder.

        With ``background`` it returns when the tensors and ``run`` are copied, and :meth:`end_save` says how
        the write ended.

        Raises:
            CheckpointError: on every rank, when any rank could not write (disk full, read-only …). All
                earlier checkpoints are as they were.
        """
        self.end_save(wait=True)
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if self.background:
            copies, about = self.background.copy(tensors), copy.deepcopy(run)
            self.background.start(lambda: self._write(step, copies, about))
        else:
            self._write(step, tensors, run)
        return step_folder(self.folder, step)

    def end_save(self, *, wait: bool) -> None:
        """Raise what a save in the background has failed with; ``wait`` until it has ended.

        Raises:
            CheckpointError: as :meth:`save` does, though not on every rank in the same call. Every method
                that uses the folder raises it, if none has before.
        """
        if self.background:
            self.background.end(wait=wait)

    def _write(self, step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        final = step_folder(self.folder, step)
        temporary = self.ranks.on_rank_0(lambda: self._new_folder(final))

        writer = CommittingWriter(
            temporary, lambda files, metadata: commit_folder(temporary, final, files, metadata, run)
        )
        try:
            with without_crc32(), self.ranks.quiet():
                dcp.save(
                    dict(tensors),
                    storage_writer=writer,
                    planner=RowByRow(),
                    process_group=self.group,
                )
        except CheckpointException as error:
            if self.ranks.rank == 0:
                steps_in(final).discard(temporary)
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved to {final}: {_reasons(error)}\n"
                "  Earlier checkpoints are as they were. Free space or repair the folder."
            ) from error
        self.saved.add(step)
        if self.ranks.rank == 0:
            self._retire(step)

    def load(
        self,
        where: int | Path | str,
        tensors: Mapping[str, Tensor],
        *,
        exclude: Sequence[str] = (),
        verify: bool = True,
    ) -> dict[str, Any]:
        """Read a step (−1: the newest) or any checkpoint folder into ``tensors``, in place; the manifest.

        Any layout loads what any other saved. Names that start with one of ``exclude`` (whole parts:
        ``optim``, ``model.output``) keep their values. Top-level names that no rank asks for, such as
        ``optim`` when only ``model`` is loaded, are skipped; within the others names must agree.
        ``verify`` checks hashes, each rank's of a share of the files.

        Raises:
            CheckpointError: on every rank alike: no such checkpoint; files missing, truncated, altered
                or unsafe; names or shapes that do not fit. ``tensors`` then may hold anything.
        """
        self.end_save(wait=True)
        folder, manifest = self.ranks.on_rank_0(lambda: self._find(where))
        load_tensors(folder, manifest, tensors, exclude=exclude, verify=verify, ranks=self.ranks)
        return manifest

    def remove_leftovers(self, exports: Path | None = None) -> None:
        """Clear what killed saves and deletions left behind, also in the run's folder of ``exports``; called
        at the start of a run that will save."""
        self.end_save(wait=True)
        self.ranks.on_rank_0(lambda: self._remove_leftovers(exports))

    def _remove_leftovers(self, exports: Path | None) -> None:
        for said in steps_in(self.folder).clear(self.folder):
            self.say(f"checkpoint: {said}")
        for said in steps_in(exports).clear(exports) if exports else ():
            self.say(f"export: {said}")

    def _new_folder(self, final: Path) -> Path:
        try:
            return steps_in(final).begin(final)
        except OSError as error:
            reason: object = f"{error.strerror}: {error.filename}"
        except DataError as error:
            reason = error
        raise CheckpointError(f"the checkpoint {final} cannot be written: {reason}")

    def _locate(self, where: int | Path | str) -> Path:
        if not isinstance(where, int):
            return expand_user(where)
        steps = committed_steps(self.folder)
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {self.folder}")
        if where != -1 and where not in steps:
            # the folder may be there without being sound; then its manifest says what is wrong
            if step_folder(self.folder, where).is_dir():
                return step_folder(self.folder, where)
            there = ", ".join(map(str, steps))
            raise CheckpointError(
                f"there is no checkpoint of step {where} in {self.folder}; there are: {there}"
            )
        return step_folder(self.folder, steps[-1] if where == -1 else where)

    def _find(self, where: int | Path | str) -> tuple[Path, dict[str, Any]]:
        folder = self._locate(where)
        return folder, read_manifest(folder)

    def _retire(self, just_saved: int) -> None:
        """Delete the oldest that need not be kept, never the one just saved. A failure is only told."""
        try:
            steps = committed_steps(self.folder)
        except (CheckpointError, DataError) as error:
            self.say(f"checkpoint: none was deleted: {error}")
            return
        for step in superseded(
            steps,
            newest=just_saved,
            keep_latest_k=self.keep_latest_k,
            keep_every_n=self.keep_every_n,
            also_kept=(self.best, self.start),
        ):
            try:
                steps_in(self.folder).delete(self.folder, step)
            except (OSError, DataError) as error:
                self.say(f"checkpoint: {step_folder(self.folder, step)} could not be deleted: {error}")


def commit_folder(
    temporary: Path, final: Path, files: Files, metadata: Metadata, run: Mapping[str, Any]
) -> None:
    """Turn the written folder into the checkpoint ``final``; runs on rank 0 after all ranks have synced."""
    unseen = [name for name in files if not (temporary / name).is_file()]
    if unseen:
        raise CheckpointError(
            f"rank 0 does not see {', '.join(unseen[:3])} in {temporary}: "
            "the checkpoint folder must be on a file system that all nodes share"
        )
    sizes = [math.prod(t.size) * t.properties.dtype.itemsize for t in tensors_of(metadata).values()]
    step = int(final.name.removeprefix("step-"))
    manifest = build_manifest(
        step=step, files=files, tensor_count=len(sizes), tensor_bytes=sum(sizes), run=dict(run)
    )
    steps_in(final).commit(temporary, final, manifest)


@contextmanager
def without_crc32() -> Iterator[None]:
    """torch's own checksum costs a third of a save, and the hash covers more."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
