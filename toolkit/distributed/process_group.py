"""The process group of a run: formed once, on NCCL or gloo, for one process as for many."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from toolkit.errors import TrainingError

PATIENCE = timedelta(hours=1)
_SEND, _RECEIVE = 12, 13  # c10d's OpType, which Python does not have
_wait = dist.Work.wait


def local_device() -> torch.device:
    """The device of this rank: its own GPU where there are GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise TrainingError(
            f"local rank {index} has no GPU: {torch.cuda.device_count()} visible on this machine; "
            "start no more processes per node than GPUs (NGPU), or hide the GPUs to train on CPU "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    return torch.device("cuda", index)


def start(device: torch.device, *, timeout_seconds: int) -> None:
    """Join the group that the launcher's environment describes, or form one of a single process.

    On CUDA, gloo carries the CPU tensors beside NCCL, so that checkpoints need no device copy.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    device_id = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_id = device
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_id, store=store, rank=0, world_size=1
        )


def patient_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for file systems, which may keep one rank busy long after the others."""
    return dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="files")


def set_timeout(timeout_seconds: int, *, except_for: dist.ProcessGroup | None = None) -> None:
    """Give every group this time-out: the groups of a mesh do not inherit the first one's."""
    timeout = timedelta(seconds=timeout_seconds)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not except_for:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    if not torch.cuda.is_available():
        _bound_transfers(timeout)


def _bound_transfers(timeout: timedelta) -> None:
    """Have sends and receives wait this long: gloo's keep the time-out that their group had when it formed.

    On NCCL its watchdog ends them in time, and waiting with a time-out would block the host.
    """

    def wait(work: dist.Work, *given: timedelta) -> bool:
        if not given and work._get_op_type() in (_SEND, _RECEIVE):  # type: ignore[attr-defined]
            return _wait(work, timeout)
        return _wait(work, *given)

    dist.Work.wait = wait  # type: ignore[assignment, method-assign]


def stop() -> None:
    """Leave the process group, if one was formed."""
    if dist.is_initialized():
        dist.destroy_process_group()
