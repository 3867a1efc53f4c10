"""Save, find, load and delete the checkpoints of a run.

A save writes DCP shards into ``step-N.tmp-<id>`` while hashing them, syncs them, adds the manifest and
commits by one rename. If it is killed at any point, either the previous or the new state remains, and
possibly a ``.tmp-`` folder that the next start removes.
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

from toolkit.checkpoint.async_save import BackgroundWriter
from toolkit.checkpoint.dcp_storage import CommittingWriter, ContiguousSavePlanner, Files, tensor_entries
from toolkit.checkpoint.load import load_tensors
from toolkit.checkpoint.manifest import (
    build_manifest,
    committed_steps,
    invalid_steps,
    read_manifest,
    step_folder,
)
from toolkit.checkpoint.retention import step_storage, steps_to_delete
from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError


class CheckpointManager:
    """The checkpoints in ``folder``.

    Every method is collective: all ranks of ``group`` (default: all) call it with the same arguments, except
    the tensors. Tensors may be DTensors of any mesh.

    Args:
        keep_latest_k: number of committed checkpoints to keep; 0 keeps all.
        keep_every_n: also keep steps that are multiples of this.
        start: also keep this step, to which every start of the run returns.
        background: writer for asynchronous saves; needs its own ``group``.
        group: must support CPU tensors (gloo).
        say: function that rank 0 calls with a line of text for the user.

    Attributes:
        best: step to keep in addition.
        saved: steps whose checkpoints this manager has committed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_latest_k: int = 0,
        keep_every_n: int | None = None,
        start: int | None = None,
        background: BackgroundWriter | None = None,
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
        assert not (background and self.ranks.size > 1 and group is None), "needs a group of its own"

    def latest(self) -> int | None:
        """Return the newest committed step on rank 0's file system, or None. Newer invalid folders are
        reported."""
        self.end_save(wait=True)
        return self.ranks.on_rank_0(self._latest)

    def _latest(self) -> int | None:
        newest = max(committed_steps(self.folder), default=None)
        for step, reason in sorted(invalid_steps(self.folder).items()):
            if newest is None or step > newest:
                self.say(f"checkpoint: passed over step-{step}: {reason}")
        return newest

    def save(self, step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> Path:
        """Save ``tensors`` by flat names as ``step-N``, with ``run`` (JSON types) in the manifest.

        Replaces a committed checkpoint of the same step, then deletes old checkpoints. Returns the folder.

        With ``background`` it returns once the tensors and ``run`` are copied, and :meth:`end_save` raises
        the error of the write, if any.

        Raises:
            CheckpointError: on every rank, if any rank could not write (disk full, read-only, …). Earlier
                checkpoints are unchanged.
        """
        self.end_save(wait=True)
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if self.background:
            copies, run_copy = self.background.copy(tensors), copy.deepcopy(run)
            self.background.start(lambda: self._write(step, copies, run_copy))
        else:
            self._write(step, tensors, run)
        return step_folder(self.folder, step)

    def end_save(self, *, wait: bool) -> None:
        """Raise the error of a background save that has ended; with ``wait``, block until it ends.

        Raises:
            CheckpointError: as in :meth:`save`, but not necessarily in the same call on every rank: the next
                method that uses the folder raises it.
        """
        if self.background:
            self.background.finish(wait=wait)

    def _write(self, step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        final = step_folder(self.folder, step)
        temporary = self.ranks.on_rank_0(lambda: self._new_folder(final))

        writer = CommittingWriter(
            temporary, lambda files, metadata: commit_folder(temporary, final, files, metadata, run)
        )
        try:
            with without_crc32(), self.ranks.suppress_dcp_warning():
                dcp.save(
                    dict(tensors),
                    storage_writer=writer,
                    planner=ContiguousSavePlanner(),
                    process_group=self.group,
                )
        except CheckpointException as error:
            if self.ranks.rank == 0:
                step_storage(final).discard(temporary)
            raise CheckpointError(
                f"the checkpoint of step {step} was not saved to {final}: {_reasons(error)}\n"
                "  Earlier checkpoints are unchanged. Free space or repair the folder."
            ) from error
        self.saved.add(step)
        if self.ranks.rank == 0:
            self._delete_old(step)

    def load(
        self,
        where: int | Path | str,
        tensors: Mapping[str, Tensor],
        *,
        exclude: Sequence[str] = (),
        verify: bool = True,
    ) -> dict[str, Any]:
        """Load a step (−1: the newest) or any checkpoint folder into ``tensors``, in place. Returns the
        manifest.

        A checkpoint can be loaded with any parallel layout. Names in ``exclude`` or below its entries (such
        as ``optim`` or ``model.output``) keep their values. A top-level name that no rank has in ``tensors``,
        such as ``optim`` when only ``model`` is loaded, is skipped; all other names must match. ``verify``
        checks the hashes of the files, which are divided among the ranks.

        Raises:
            CheckpointError: on every rank: the checkpoint does not exist; files are missing, truncated,
                altered or unsafe; or names or shapes do not match. The contents of ``tensors`` are then
                undefined.
        """
        self.end_save(wait=True)
        folder, manifest = self.ranks.on_rank_0(lambda: self._find(where))
        load_tensors(folder, manifest, tensors, exclude=exclude, verify=verify, ranks=self.ranks)
        return manifest

    def remove_leftovers(self, exports: Path | None = None) -> None:
        """Remove the leftovers of killed saves and deletions, including those in the run's folder of
        ``exports``; called at the start of a run that saves."""
        self.end_save(wait=True)
        self.ranks.on_rank_0(lambda: self._remove_leftovers(exports))

    def _remove_leftovers(self, exports: Path | None) -> None:
        for message in step_storage(self.folder).clear(self.folder):
            self.say(f"checkpoint: {message}")
        for message in step_storage(exports).clear(exports) if exports else ():
            self.say(f"export: {message}")

    def _new_folder(self, final: Path) -> Path:
        try:
            return step_storage(final).begin(final)
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
            # The folder may exist but be invalid; then reading its manifest reports the reason.
            if step_folder(self.folder, where).is_dir():
                return step_folder(self.folder, where)
            available = ", ".join(map(str, steps))
            raise CheckpointError(
                f"there is no checkpoint of step {where} in {self.folder}; available: {available}"
            )
        return step_folder(self.folder, steps[-1] if where == -1 else where)

    def _find(self, where: int | Path | str) -> tuple[Path, dict[str, Any]]:
        folder = self._locate(where)
        return folder, read_manifest(folder)

    def _delete_old(self, just_saved: int) -> None:
        """Delete the oldest checkpoints that are not to be kept, but never the one just saved. A failure is
        reported and does not raise."""
        try:
            steps = committed_steps(self.folder)
        except (CheckpointError, DataError) as error:
            self.say(f"checkpoint: none was deleted: {error}")
            return
        for step in steps_to_delete(
            steps,
            newest=just_saved,
            keep_latest_k=self.keep_latest_k,
            keep_every_n=self.keep_every_n,
            also_kept=(self.best, self.start),
        ):
            try:
                step_storage(self.folder).delete(self.folder, step)
            except (OSError, DataError) as error:
                self.say(f"checkpoint: {step_folder(self.folder, step)} could not be deleted: {error}")


def commit_folder(
    temporary: Path, final: Path, files: Files, metadata: Metadata, run: Mapping[str, Any]
) -> None:
    """Commit the temporary folder as the checkpoint ``final``, on rank 0, after all ranks have synced."""
    missing = [name for name in files if not (temporary / name).is_file()]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see {', '.join(missing[:3])} in {temporary}: "
            "the checkpoint folder must be on a file system that all nodes share"
        )
    sizes = [math.prod(t.size) * t.properties.dtype.itemsize for t in tensor_entries(metadata).values()]
    step = int(final.name.removeprefix("step-"))
    manifest = build_manifest(
        step=step, files=files, tensor_count=len(sizes), tensor_bytes=sum(sizes), run=dict(run)
    )
    step_storage(final).commit(temporary, final, manifest)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Disable torch's checksum, which takes a third of the save time; the hash covers more."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))
