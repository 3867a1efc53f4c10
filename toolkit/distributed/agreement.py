"""Decisions that all ranks share, so that none goes on alone and none waits for one that failed."""

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
    """The ranks that save or load together; a process without a process group is ``alone``, others may be."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False):
        self.distributed = dist.is_initialized() and not alone
        self.group = group if self.distributed else None
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    def on_rank_0(self, make: Callable[[], T]) -> T:
        """Return on every rank the result of ``make`` on rank 0.

        Raises:
            CheckpointError, DataError: ``make`` failed; the same message on every rank, a CheckpointError
                where it was neither.
        """
        outcome: list = [None, None]
        if self.rank == 0:
            try:
                outcome = [make(), None]
            except (CheckpointError, DataError) as error:
                outcome = [None, (type(error), str(error))]
            except Exception as error:  # the others must hear of it, whatever it is
                outcome = [None, (CheckpointError, f"rank 0: {type(error).__name__}: {error}")]
        if self.size > 1:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        value, failure = outcome
        if failure is not None:
            kind, message = failure
            raise kind(message)
        return value

    def gather_problems(self, problems: Sequence[str]) -> list[str]:
        """The problems of all ranks, each once, in rank order; the same list on every rank."""
        gathered: list = [list(problems)]
        if self.size > 1:
            gathered = [None] * self.size
            dist.all_gather_object(gathered, list(problems), group=self.group)
        return list(dict.fromkeys(problem for found in gathered for problem in found))

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Element by element, whether any rank has it set. One byte an element, whatever the world size."""
        marks = torch.tensor(flags, dtype=torch.uint8)
        if self.size > 1:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.group)
        return marks.bool().tolist()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without DCP's warning that a process is alone. With a group it gives none, and filters of
        warnings are no matter for a thread in the background."""
        if self.distributed:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
