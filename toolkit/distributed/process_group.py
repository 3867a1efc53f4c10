"""The process group of a run, with NCCL or gloo; a single process has one too."""

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
from toolkit.distributed.collectives import set_transfer_timeout
from toolkit.errors import DeviceError, Problem
from toolkit.hardware import cpu_multiplies_bf16
from toolkit.launcher.environment import SUPERVISED, rank_environment

GLOO = "gloo_one_thread"
"""Backend of CPU tensors: torch's gloo with one worker thread per group.

gloo's default of two threads write the name of finished work into one string without a lock, so all-gathers
of tensor and context parallelism corrupt the heap (docs/parallelism.md)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_WARN_AFTER = 5.0
"""Seconds after which a rank prints a warning that it waits for others."""


def local_device(checked: str = "") -> torch.device:
    """Return this rank's device: its GPU if the machine has GPUs, else the CPU.

    Raises:
        DeviceError: torch finds another device type than the preflight ``checked`` ("cuda", "cpu", or "" if
            unknown), or there are fewer GPUs than ranks on this machine.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if checked == "cuda" != device:
        why, fix = _why_no_gpu()
        raise _device_mismatch(f"nvidia-smi shows GPUs, but torch cannot use them: {why}", fix)
    if checked == "cpu" != device:
        rule = f"nvidia-smi shows no GPU, but torch finds {torch.cuda.device_count()}"
        raise _device_mismatch(rule, "add nvidia-smi to PATH where the run starts")
    if device == "cpu":
        return torch.device("cpu")
    index = rank_environment(os.environ).local_rank
    if index >= torch.cuda.device_count():
        rule = f"local rank {index} has no GPU: torch finds {torch.cuda.device_count()} on this machine"
        fix = "start at most one process per GPU (NGPU), or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        raise DeviceError(Problem(rule, fix))
    return torch.device("cuda", index)


def native_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device supports it natively, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        native = cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32


def _device_mismatch(rule: str, fix: str) -> DeviceError:
    return DeviceError(Problem(rule, f"{fix}, or train on the CPU with --training.device cpu"))


def _single_threaded_gloo(group: Any, _: Any) -> dist.ProcessGroupGloo:
    """Create a gloo group like torch does, but with one thread instead of two."""
    gloo = dist.ProcessGroupGloo
    # A thread uses one device, so only the first of several interfaces is used.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
    options = gloo_options(device, threads=1, timeout=group.timeout)
    options.group_name = group.group_id
    # torch leaves this empty for the default group, but splitting a group that has no ranks crashes.
    options.global_ranks_in_group = group.global_ranks_in_group or list(range(group.group_size))
    return gloo(group.store, group.group_rank, group.group_size, options)


# Registered, because `new_group` passes no options to gloo. Like torch's gloo, for both devices: `new_group`
# looks up each group's backend for the GPU to which the default group is bound.
dist.Backend.register_backend(GLOO, _single_threaded_gloo, extended_api=True, devices=["cpu", "cuda"])


def start(device: torch.device, *, timeout_seconds: int) -> None:
    """Initialize the default process group from the environment, or a group of only this process.

    On CUDA, gloo is used for CPU tensors alongside NCCL, so that checkpoints need no copies on the device.
    """
    backend = f"cpu:{GLOO},cuda:nccl" if device.type == "cuda" else GLOO
    timeout = timedelta(seconds=timeout_seconds)
    device_id = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_id = device
    environment = rank_environment(os.environ)
    if environment.world_size > 1:
        timer = threading.Timer(_WARN_AFTER, _report_waiting, [environment.rank, environment.world_size])
        timer.daemon = True
        if SUPERVISED not in os.environ:  # otherwise the launcher reports missing ranks
            timer.start()
        try:
            dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        finally:
            timer.cancel()
    else:
        store = dist.HashStore()
        dist.init_process_group(
            backend, timeout=timeout, device_id=device_id, store=store, rank=0, world_size=1
        )


def _report_waiting(rank: int, world_size: int) -> None:
    """Print where this rank waits and for which ranks; other ranks print only if rank 0 does not listen."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    others = "rank 0"
    if rank == 0:
        others = "rank 1" if world_size == 2 else f"some of the ranks 1 to {world_size - 1}"
    else:
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=_WARN_AFTER):
            return
    fix = f"start each with its RANK, WORLD_SIZE={world_size}, MASTER_ADDR={host} and MASTER_PORT={port}"
    print(
        f"rank {rank} of {world_size} waits for {others} at {host}:{port}; {fix}", file=sys.stderr, flush=True
    )


def new_file_group(*, timeout_seconds: int) -> dist.ProcessGroup:
    """Create a gloo group of all ranks for waits that need a longer timeout (file I/O, user input)."""
    return dist.new_group(backend=GLOO, timeout=timedelta(seconds=timeout_seconds), group_desc="files")


def set_timeout(timeout_seconds: int, *, except_for: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of every group; mesh groups do not inherit the default group's timeout."""
    timeout = timedelta(seconds=timeout_seconds)
    for group in process_groups():
        if group is not except_for:
            group.set_timeout(timeout)
    if not torch.cuda.is_available():
        set_transfer_timeout(timeout)


def stop() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _why_no_gpu() -> tuple[str, str]:
    """Return why torch finds no GPU although the machine has some, and the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA", "install torch's build for CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the driver's message
        return str(error).split("\n")[0], f"install a driver for CUDA {torch.version.cuda}, or an older torch"
    return "torch reports no reason", "call torch.cuda.init() to see the error"
