"""Collective decisions, so that no rank continues alone or waits for a failed rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from toolkit.errors import CheckpointError, DataError

T = TypeVar("T")


class Ranks:
    """The ranks that save or load together. ``alone`` ignores the process group, if any."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False):
        self.distributed = dist.is_initialized() and not alone
        self.group = group if self.distributed else None
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    def on_rank_0(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and return its result on every rank.

        Raises:
            CheckpointError, DataError: ``make`` failed; every rank raises the same message. Other exceptions
                become a CheckpointError.
        """
        outcome: list = [None, None]
        if self.rank == 0:
            try:
                outcome = [make(), None]
            except (CheckpointError, DataError) as error:
                outcome = [None, (type(error), str(error))]
            except Exception as error:  # any failure must reach the other ranks
                outcome = [None, (CheckpointError, f"rank 0: {type(error).__name__}: {error}")]
        if self.size > 1:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        value, failure = outcome
        if failure is not None:
            kind, message = failure
            raise kind(message)
        return value

    def gather_problems(self, problems: Sequence[str]) -> list[str]:
        """Return the distinct problems of all ranks, in rank order; the same list on every rank."""
        gathered: list = [list(problems)]
        if self.size > 1:
            gathered = [None] * self.size
            dist.all_gather_object(gathered, list(problems), group=self.group)
        return list(dict.fromkeys(problem for per_rank in gathered for problem in per_rank))

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return, per element, whether the flag is set on any rank. Communicates one byte per element."""
        bits = torch.tensor(flags, dtype=torch.uint8)
        if self.size > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=self.group)
        return bits.bool().tolist()

    @contextmanager
    def suppress_dcp_warning(self) -> Iterator[None]:
        """Suppress DCP's warning about a missing process group. With a group, nothing is changed, because
        changing warning filters is not thread-safe, and this may run in a background thread."""
        if self.distributed:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
