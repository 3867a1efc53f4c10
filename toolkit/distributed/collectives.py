"""torch's functional collectives, which torch.compile can trace, and the functions that wait for them.

Only :func:`wait` and :func:`wait_for_work` block the host; with gloo, until the other ranks arrive. The time
is added to :data:`waited`, which distinguishes slow ranks from those that wait for them. After
:func:`set_transfer_timeout`, torch's own waits (FSDP's collectives, sends and receives of pipeline schedules)
also call :func:`wait_for_work`. Two kinds of wait are not counted: the reductions over tp of norm gradients,
which FSDP redistributes as DTensors, and collectives in compiled regions.

Groups are passed by name, because torch.compile guards on the identity of a process group.
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

_torch_wait = dist.Work.wait
_SEND, _RECEIVE = 12, 13  # values of c10d's OpType, which has no Python binding


@dataclass
class Waited:
    """Seconds that this process was blocked in collectives and transfers, and the timeout of transfers."""

    seconds: float = 0.0
    transfer_timeout: timedelta | None = None


waited = Waited()


@contextmanager
def _timed() -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        waited.seconds += time.perf_counter() - started


def wait(pending: Tensor) -> Tensor:
    """Wait for a functional collective: on the current stream for a GPU tensor, on the host for a CPU
    tensor."""
    if torch.compiler.is_compiling():
        return functional_collectives.wait_tensor(pending)
    with _timed():
        return functional_collectives.wait_tensor(pending)


def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """Return the "sum" or "max" over ranks, on every rank."""
    return wait(functional_collectives.all_reduce(x, operation, group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate the tensors of all ``size`` ranks along the first dimension."""
    return wait(functional_collectives.all_gather_into_tensor(x, size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum over ``size`` ranks and return this rank's chunk along the first dimension."""
    return wait(functional_collectives.reduce_scatter_tensor(x, "sum", size, group))


def start_all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start an exchange of rows of ``x``, ``sent`` to and ``received`` from each rank. Pass the result to
    :func:`wait`."""
    return functional_collectives.all_to_all_single(x, received, sent, group)


def wait_for_work(work: dist.Work, *timeout: timedelta) -> bool:
    """Wait for a collective or a transfer of torch.distributed."""
    if not timeout and waited.transfer_timeout and work_operation(work) in (_SEND, _RECEIVE):
        timeout = (waited.transfer_timeout,)
    with _timed():
        return _torch_wait(work, *timeout)


def set_transfer_timeout(timeout: timedelta) -> None:
    """Set the timeout of sends and receives, which under gloo otherwise keep that of the group's creation.

    NCCL does not need it: its watchdog ends transfers in time, and waiting with a timeout would block the
    host.
    """
    waited.transfer_timeout = timeout
    replace_work_wait(wait_for_work)
