"""The check, before a run trains, that a checkpoint of it can be written."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError
from toolkit.io.atomic import sync_file, sync_folder

STATE = 4
"""Times the bytes of a model: more than a checkpoint takes, which with the moments of Adam is three times."""


def check_room(
    folder: Path,
    model: Iterable[Tensor],
    everything: Callable[[], Iterable[Tensor]],
    *,
    stages: int,
    ranks: Ranks,
    group: dist.ProcessGroup,
) -> None:
    """See that files can be written into ``folder`` and brought to its disk, and that it has room for a
    checkpoint: the tensors of this rank's ``model``, one of ``stages``, or ``everything``, which is only
    asked for where that is near, since it makes the optimizer's state. Every rank calls it; rank 0 looks.

    Raises:
        CheckpointError: it cannot be done, or there is not; on every rank.
    """
    free = ranks.on_rank_0(lambda: _free(folder))
    if free >= STATE * checkpoint_bytes(model, stages=stages, group=group):
        return
    size = checkpoint_bytes(everything(), stages=stages, group=group)
    if free < size:
        raise CheckpointError(
            f"a checkpoint of this run takes {size / 1e9:.3g} GB, and {folder} has {free / 1e9:.3g} GB left\n"
            "  fix:  make room there, or name another checkpoint.folder (an old checkpoint is deleted only "
            "when the new one is complete)"
        )


def checkpoint_bytes(tensors: Iterable[Tensor], *, stages: int, group: dist.ProcessGroup) -> int:
    """Bytes of ``tensors`` of all stages, each as a whole: ranks of a stage have parts of the same."""
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    total = torch.tensor(float(own), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return int(total) * stages // dist.get_world_size(group)


def _free(folder: Path) -> int:
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    if not isinstance(folder, Path):  # object storage tells no size
        probe.write_new(b"probe")
        probe.unlink()
        return sys.maxsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(b"probe")
                sync_file(file)
            sync_folder(folder)
        finally:
            with suppress(OSError):
                probe.unlink()
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written into {folder}: {error}\n"
            "  fix:  name another checkpoint.folder or job.dump_folder, or have its storage take files"
        ) from None
