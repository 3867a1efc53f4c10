"""The clocks of the ranks' machines, compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 5
MOST_SECONDS = 1.0
"""Beyond it, what files of several machines tell is hard to put in order, and object storage may refuse."""


def clock_offsets(clock: Callable[[], float] = time.time) -> list[float]:
    """The seconds by which each rank's ``clock`` is ahead of rank 0's, to some milliseconds: all ranks read
    theirs as they leave a collective, of which the middle one of some counts."""
    world = dist.get_world_size()
    rounds = []
    for _ in range(ROUNDS):
        dist.all_reduce(torch.zeros(1))
        times = torch.zeros(world, dtype=torch.float64)
        times[dist.get_rank()] = clock()
        dist.all_reduce(times)
        rounds.append((times - times[0]).tolist())
    return [median(of_rank) for of_rank in zip(*rounds, strict=True)]


def hosts() -> list[str]:
    """The host name of each rank."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names


def clock_skew() -> list[str]:
    """A line for each machine whose clock is not that of rank 0's; the same on all ranks."""
    names, offsets = hosts(), clock_offsets()
    return skewed({name: offsets[names.index(name)] for name in names}, names[0])


def skewed(offsets: dict[str, float], first: str) -> list[str]:
    """A line for each machine whose clock is more than a second before or behind that of ``first``."""
    return [
        f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of "
        f"{first}: times in logs and traces do not compare; synchronise them (chrony, ntp)"
        for name, offset in offsets.items()
        if abs(offset) > MOST_SECONDS
    ]
