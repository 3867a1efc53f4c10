"""torch's functional collectives, which torch.compile traces, and the one place where this toolkit waits.

The host blocks in :func:`wait` and in :func:`wait_for_work`, on gloo until the other ranks are there: the
seconds are counted in :data:`waited`, which tells a slow rank from those that wait for it. What torch waits
for by itself (FSDP's collectives, sends and receives of pipeline schedules) passes through
:func:`wait_for_work` too, once :func:`bound_transfers` was called. Not counted are the sums over tp of norms'
gradients, which FSDP redistributes as DTensors, and what is within a compiled region.

Groups are given by name: torch.compile guards the identity of a process group that a module holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.compat import functional_collectives, replace_work_wait, work_operation

_torchs_wait = dist.Work.wait
_SEND, _RECEIVE = 12, 13  # c10d's OpType, which Python does not have


@dataclass
class Waited:
    """Seconds that this process has been blocked in collectives and transfers; a transfer may block it
    ``at_most`` so long."""

    seconds: float = 0.0
    at_most: timedelta | None = None


waited = Waited()


@contextmanager
def _counted() -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        waited.seconds += time.perf_counter() - started


def wait(pending: Tensor) -> Tensor:
    """The result of a functional collective, on the device's stream or, on a CPU, in memory."""
    if torch.compiler.is_compiling():
        return functional_collectives.wait_tensor(pending)
    with _counted():
        return functional_collectives.wait_tensor(pending)


def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """The "sum" or "max" over ranks, on each of them."""
    return wait(functional_collectives.all_reduce(x, operation, group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The tensors of all ``size`` ranks along the first dimension."""
    return wait(functional_collectives.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's part, along the first dimension, of the sum over ``size`` ranks."""
    return wait(functional_collectives.reduce_scatter_tensor(x, "sum", size, group))


def start_all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Begin to exchange rows of ``x``, so many with each rank; to be waited for."""
    return functional_collectives.all_to_all_single(x, received, sent, group)


def wait_for_work(work: dist.Work, *timeout: timedelta) -> bool:
    """Wait for a collective or a transfer of torch.distributed."""
    if not timeout and waited.at_most and work_operation(work) in (_SEND, _RECEIVE):
        timeout = (waited.at_most,)
    with _counted():
        return _torchs_wait(work, *timeout)


def bound_transfers(timeout: timedelta) -> None:
    """Have sends and receives wait this long: gloo's keep the time-out that their group had when it formed.

    On NCCL its watchdog ends them in time, and waiting with a time-out would block the host.
    """
    waited.at_most = timeout
    replace_work_wait(wait_for_work)
