"""Weights that FSDP shards for generation: gathered once where there is room, else for every token."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.launcher.environment import whole_number

_SHARE = 0.5
"""The part of the free memory for gathered weights; the rest is for shards, keys and values."""


def fits_gathered(model: nn.Module, device: torch.device) -> tuple[bool, str]:
    """Say if all ranks have room for the gathered weights of ``model``, which has no storage yet and which tp
    has split already; alike on every rank. Beside it what a user should know where they have not."""
    ranks = Ranks()
    parts = (shard_and_offset(parameter)[0] for parameter in model.parameters())
    weights = sum(part.nbytes for part in parts)
    sharing = whole_number(os.environ, "LOCAL_WORLD_SIZE", ranks.size, 1) if device.type == "cpu" else 1
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_here()
    fits = not ranks.any_of([weights * sharing > _SHARE * free])[0]
    if fits:
        return True, ""
    return False, (
        f"each token gathers all weights anew: {weights / 2**30:.1f} GiB for each of {sharing} rank(s) are "
        f"more than half of the {free / 2**30:.1f} GiB that are free; --tp N, which splits them over N ranks "
        "and gathers none, is faster"
    )


def free_gathered(model: nn.Module) -> None:
    """Free what is gathered, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _free_here() -> int:
    """Bytes that processes of this machine, or of its control group, can still take; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no group, or no limit
        return free
    return min(free, max(0, limit - int(used.get("anon", 0))))  # files that were read give their memory back
