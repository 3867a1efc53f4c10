"""Compare the clocks of the ranks' machines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 5
MAX_SKEW_SECONDS = 1.0
"""Larger differences make it hard to order logs of several machines, and object storage may reject
requests."""


def clock_offsets(clock: Callable[[], float] = time.time) -> list[float]:
    """Return how many seconds each rank's ``clock`` is ahead of rank 0's, accurate to a few milliseconds.

    All ranks read their clocks when they leave a collective; the result is the median of several rounds.
    """
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
    """Return the host name of each rank."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names


def clock_skew() -> list[str]:
    """Return a warning for each machine whose clock differs from rank 0's; the same on all ranks."""
    names, offsets = hosts(), clock_offsets()
    return skew_warnings({name: offsets[names.index(name)] for name in names}, names[0])


def skew_warnings(offsets: dict[str, float], first: str) -> list[str]:
    """Return a warning for each machine whose clock differs from the clock of ``first`` by more than a
    second."""
    return [
        f"the clock of {name} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of "
        f"{first}: times in logs and traces are not comparable; synchronize the clocks (chrony, ntp)"
        for name, offset in offsets.items()
        if abs(offset) > MAX_SKEW_SECONDS
    ]
