"""The process group of a run: formed once, on NCCL or gloo, for one process as for many."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from toolkit.compat import gloo_options, process_groups
from toolkit.distributed.collectives import bound_transfers
from toolkit.errors import DeviceError, Problem
from toolkit.hardware import cpu_multiplies_bf16
from toolkit.launcher.environment import SUPERVISED, rank_environment

GLOO = "gloo_one_thread"
"""The back end of CPU tensors: torch's gloo with one worker thread a group.

torch gives a group two, and both write the name of the work that they finish into one string without a lock:
all-gathers of tensor and context parallelism then break the heap (docs/parallelism.md)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_PATIENCE = 5.0
"""Seconds after which a rank that waits for others says so."""


def local_device(checked: str = "") -> torch.device:
    """The device of this rank: its own GPU where there are GPUs, else the CPU.

    Raises:
        DeviceError: the checks before the start were made for another kind than torch finds ("cuda" or
            "cpu", if any were ``checked``), or there are fewer GPUs than ranks here.
    """
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if checked == "cuda" != found:
        why, fix = _why_no_gpu()
        raise _unlike(f"nvidia-smi shows GPUs here, and torch can use none: {why}", fix)
    if checked == "cpu" != found:
        rule = f"nvidia-smi shows no GPU here, and torch finds {torch.cuda.device_count()}"
        raise _unlike(rule, "have nvidia-smi work where the run starts (its folder in PATH)")
    if found == "cpu":
        return torch.device("cpu")
    index = rank_environment(os.environ).local_rank
    if index >= torch.cuda.device_count():
        rule = f"local rank {index} has no GPU: torch finds {torch.cuda.device_count()} on this machine"
        fix = "start no more processes here than GPUs (NGPU), or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        raise DeviceError(Problem(rule, fix))
    return torch.device("cuda", index)


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32


def _unlike(rule: str, fix: str) -> DeviceError:
    return DeviceError(Problem(rule, f"{fix}, or train on the CPU with --training.device cpu"))


def _with_one_thread(group: Any, _: Any) -> dist.ProcessGroupGloo:
    """A gloo group as torch makes it, of one thread in place of two."""
    gloo = dist.ProcessGroupGloo
    # A thread talks through one device: of several interfaces it takes the first.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
    options = gloo_options(device, threads=1, timeout=group.timeout)
    options.group_name = group.group_id
    # torch leaves it empty for the default group, and a split of a group without ranks would crash.
    options.global_ranks_in_group = group.global_ranks_in_group or list(range(group.group_size))
    return gloo(group.store, group.group_rank, group.group_size, options)


# Since `new_group` hands no options on to gloo. For both devices, as torch's own: `new_group` asks each group
# for its back end of the GPU that the first one is bound to.
dist.Backend.register_backend(GLOO, _with_one_thread, extended_api=True, devices=["cpu", "cuda"])


def start(device: torch.device, *, timeout_seconds: int) -> None:
    """Join the group that the launcher's environment describes, or form one of a single process.

    On CUDA, gloo carries the CPU tensors beside NCCL, so that checkpoints need no device copy.
    """
    backend = f"cpu:{GLOO},cuda:nccl" if device.type == "cuda" else GLOO
    timeout = timedelta(seconds=timeout_seconds)
    device_id = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_id = device
    here = rank_environment(os.environ)
    if here.world_size > 1:
        waits = threading.Timer(_PATIENCE, _say_who_is_awaited, [here.rank, here.world_size])
        waits.daemon = True
        if SUPERVISED not in os.environ:  # else the launcher looks after its ranks
            waits.start()
        try:
            dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        finally:
            waits.cancel()
    else:
        store = dist.HashStore()
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_id, store=store, rank=0, world_size=1
        )


def _say_who_is_awaited(rank: int, world_size: int) -> None:
    """Say where this rank waits, and for whom: rank 0 for some of the others, they for a rank 0 that does not
    listen."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    others = "rank 0"
    if rank == 0:
        others = "rank 1" if world_size == 2 else f"some of the ranks 1 to {world_size - 1}"
    else:
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=_PATIENCE):
            return
    fix = f"start each with its RANK, WORLD_SIZE={world_size}, MASTER_ADDR={host} and MASTER_PORT={port}"
    print(
        f"rank {rank} of {world_size} waits for {others} at {host}:{port}; {fix}", file=sys.stderr, flush=True
    )


def patient_group(*, timeout_seconds: int) -> dist.ProcessGroup:
    """A gloo group of all ranks for what may keep one rank busy long after the others: files, or a user."""
    return dist.new_group(backend=GLOO, timeout=timedelta(seconds=timeout_seconds), group_desc="files")


def set_timeout(timeout_seconds: int, *, except_for: dist.ProcessGroup | None = None) -> None:
    """Give every group this time-out: the groups of a mesh do not inherit the first one's."""
    timeout = timedelta(seconds=timeout_seconds)
    for group in process_groups():
        if group is not except_for:
            group.set_timeout(timeout)
    if not torch.cuda.is_available():
        bound_transfers(timeout)


def stop() -> None:
    """Leave the process group, if one was formed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _why_no_gpu() -> tuple[str, str]:
    """Return why torch finds no GPU on a machine that has some, and the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA", "install torch's build for CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the words of the driver
        return str(error).split("\n")[0], f"install a driver for CUDA {torch.version.cuda}, or an older torch"
    return "it says no more", "see what torch.cuda.init() says"
