"""Check, before training, that a checkpoint of the run can be written."""

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

_STATE_FACTOR = 4
"""Upper bound of a checkpoint's size relative to the model; with Adam's moments the ratio is three."""


def check_free_space(
    folder: Path,
    model: Iterable[Tensor],
    everything: Callable[[], Iterable[Tensor]],
    *,
    stages: int,
    ranks: Ranks,
    group: dist.ProcessGroup,
) -> None:
    """Check that ``folder`` is writable and can be synced, and that a checkpoint fits. Collective.

    ``model`` contains this rank's tensors; ``stages`` is the number of pipeline stages. ``everything``
    returns all tensors of the checkpoint. Because this creates the optimizer state, it is called only if
    space is scarce.

    Raises:
        CheckpointError: on every rank: ``folder`` is not writable, or has too little free space.
    """
    free = ranks.on_rank_0(lambda: _free_bytes(folder))
    if free >= _STATE_FACTOR * checkpoint_bytes(model, stages=stages, group=group):
        return
    size = checkpoint_bytes(everything(), stages=stages, group=group)
    if free < size:
        raise CheckpointError(
            f"a checkpoint of this run takes {size / 1e9:.3g} GB, {folder} has {free / 1e9:.3g} GB free\n"
            "  fix:  free space there, or set another checkpoint.folder (an old checkpoint is deleted only "
            "when the new one is complete)"
        )


def checkpoint_bytes(tensors: Iterable[Tensor], *, stages: int, group: dist.ProcessGroup) -> int:
    """Return the total size of ``tensors`` over all stages; each rank of a stage stores a shard of them."""
    local_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    total = torch.tensor(float(local_bytes), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return int(total) * stages // dist.get_world_size(group)


def _free_bytes(folder: Path) -> int:
    probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
    if not isinstance(folder, Path):  # object storage does not report free space
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
            f"checkpoints cannot be written to {folder}: {error}\n"
            "  fix:  set another checkpoint.folder or job.dump_folder, or make its storage writable"
        ) from None
