"""Decide whether FSDP gathers the weights once for generation, or again for every token."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.launcher.environment import whole_number

_MAX_FRACTION = 0.5
"""Fraction of free memory available for gathered weights; the rest is for shards and the KV cache."""


def fits_unsharded(model: nn.Module, device: torch.device) -> tuple[bool, str]:
    """Report whether the gathered weights of ``model``, on the meta device and sharded by tp, fit on all
    ranks, and a note for the user if they do not. The result is the same on every rank."""
    ranks = Ranks()
    parts = (shard_and_offset(parameter)[0] for parameter in model.parameters())
    weights = sum(part.nbytes for part in parts)
    sharing = whole_number(os.environ, "LOCAL_WORLD_SIZE", ranks.size, 1) if device.type == "cpu" else 1
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_memory()
    fits = not ranks.any_of([weights * sharing > _MAX_FRACTION * free])[0]
    if fits:
        return True, ""
    return False, (
        f"all weights are gathered for every token: {weights / 2**30:.1f} GiB for each of {sharing} rank(s) "
        f"exceed half of the {free / 2**30:.1f} GiB of free memory; --tp N, which shards them over N "
        "ranks without gathering, is faster"
    )


def reshard_all(model: nn.Module) -> None:
    """Free gathered parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _free_host_memory() -> int:
    """Return the free memory of this machine or its control group in bytes; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit
        return free
    return min(free, max(0, limit - int(used.get("anon", 0))))  # the page cache can be reclaimed
