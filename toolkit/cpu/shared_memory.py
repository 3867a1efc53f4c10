"""FSDP's all-gathers and reduce-scatters through memory shared by the ranks of a machine, instead of gloo's
sockets.

An all-gather uses one region: each rank copies its shards into it and reads all shards. A reduce-scatter uses
a region with one part per rank: each rank writes its gradients into its part, and sums its shard over all
parts, in rank order. A small all-reduce, the barrier, confirms that all ranks have written.

Regions are reused. A region is free if, at a barrier, no rank still has a tensor in it, so all ranks agree on
the free regions and take the same one next. If torch prefetches parameters, the barrier of their all-gather
continues while the previous unit is computed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from toolkit.distributed.collectives import wait_for_work

_ENOUGH = 3
"""Number of regions: for the gathered unit, the next unit, and a reduction."""


class NotShared(Exception):
    """A rank of the group cannot access another rank's memory."""


@dataclass
class Region:
    """Memory shared by all ranks of a group, and the buffer of the tensor that this rank last allocated in
    it."""

    memory: mmap.mmap
    tensor: weakref.ref[memoryview] | None = None
    free: bool = True  # on all ranks
    given: int = 0  # number of barriers begun before the last allocation in it


class GatherBarrier(dist.Work):
    """An all-reduce that confirms that all ranks are at the same operation, and exchanges which regions they
    use."""

    def __init__(self, memory: SharedMemory, operation: str, size: int):
        super().__init__()
        self.memory, self.number = memory, memory.barriers
        self.at = f"{operation} of {size} bytes"
        self.regions = list(memory.regions)
        self.asked = torch.tensor([self.regions.index(memory.last), size])
        held = [region.tensor is not None and region.tensor() is not None for region in self.regions]
        self.most = torch.cat([self.asked, -self.asked, torch.tensor(held)])
        self.work = dist.all_reduce(self.most, op=dist.ReduceOp.MAX, group=memory.group, async_op=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all ranks have arrived.

        Raises:
            RuntimeError: they are not at the same operation.
        """
        while self in self.memory.open:
            self.memory.open.pop(0)._end()
        return True

    def _end(self) -> None:
        assert self.work is not None
        wait_for_work(self.work)
        most, asked = self.most, self.asked
        if not (torch.equal(most[:2], asked) and torch.equal(most[2:4], -asked)):
            raise RuntimeError(f"rank {self.memory.rank} is at {self.at}, and others are not")
        for region, by_any in zip(self.regions, most[4:].tolist(), strict=True):
            if region.given <= self.number:
                region.free = not by_any


class SharedMemory:
    """The shared-memory regions of the ranks of ``group``.

    Raises:
        NotShared: the ranks are not all on one machine, or cannot access each other's memory there.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.regions: list[Region] = []
        self.barriers = 0
        self.open: list[GatherBarrier] = []
        """Barriers that have begun and not been waited for."""
        self.last = self._add(mmap.PAGESIZE)
        """The region of the last allocation."""

    def allocate(self, count: int, dtype: torch.dtype, *, parts: int = 1) -> Tensor:
        """Allocate a tensor (count,) in a free region, in this rank's part if there are several ``parts``."""
        size = _whole_pages(count * dtype.itemsize)
        region = self._take(size * parts)
        start = size * self.rank if parts > 1 else 0
        # A tensor keeps its source buffer alive, and a view of the tensor keeps the storage alive.
        buffer = memoryview(region.memory)[start : start + max(count, 1) * dtype.itemsize]
        region.tensor, region.free, region.given = weakref.ref(buffer), False, self.barriers
        self.last = region
        return torch.frombuffer(buffer, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)

    def part(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor (count,) of another rank in the region of the last allocation."""
        start = _whole_pages(count * dtype.itemsize) * rank
        return torch.frombuffer(self.last.memory, dtype=dtype, count=count, offset=start)

    def shards(self, written: Tensor, operation: str) -> list[Tensor]:
        """Return this rank's shard of the tensors that the ranks have ``written`` into the last allocation,
        which becomes free at the next barrier."""
        self.meet(operation, written.nbytes).wait()
        count = written.numel() // self.size
        # torch keeps its input until the next reduction; after the next barrier no rank reads it.
        self.last.tensor = None
        return [
            self.part(rank, written.numel(), written.dtype).narrow(0, self.rank * count, count)
            for rank in range(self.size)
        ]

    def meet(self, operation: str, size: int) -> GatherBarrier:
        """Begin a barrier that checks that all ranks are at ``operation`` with ``size`` bytes."""
        barrier = GatherBarrier(self, operation, size)
        self.barriers += 1
        self.open.append(barrier)
        return barrier

    def _take(self, size: int) -> Region:
        """Return the smallest free region of ``size`` bytes, or a new one that replaces the smallest one."""
        if not self._fitting(size) and self.open:
            self.open[-1].wait()
        if not self._fitting(size) and len(self.regions) < _ENOUGH:
            return self._add(size)
        if not self._fitting(size):
            self.meet("allocate", size).wait()  # tensors freed since the last barrier may be enough
        if fitting := self._fitting(size):
            return min(fitting, key=_size)
        if free := self._fitting(0):
            self.regions.remove(min(free, key=_size))
        return self._add(size)

    def _fitting(self, size: int) -> list[Region]:
        return [region for region in self.regions if region.free and _size(region) >= size]

    def _add(self, size: int) -> Region:
        """Map new memory, which the group's first rank creates and the others open.

        An open file is identified by process id and descriptor. Random bytes in the file verify that it is
        the right one, because other machines and containers use the same numbers.
        """
        mark, descriptor, memory = os.urandom(16), -1, None
        if self.rank == 0:
            with suppress(OSError, AttributeError):  # forbidden in some containers, and only on Linux
                descriptor = os.memfd_create("toolkit-fsdp")
                os.ftruncate(descriptor, size)
                os.pwrite(descriptor, mark, 0)
        said: list[Any] = [(os.getpid(), descriptor, mark)]
        dist.broadcast_object_list(said, group=self.group, group_src=0)
        process, number, mark = said[0]
        with suppress(OSError):
            if self.rank:
                descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            if os.pread(descriptor, len(mark), 0) == mark:
                memory = mmap.mmap(descriptor, size)
        everywhere = torch.tensor(memory is not None)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self.group)
        if descriptor >= 0:
            os.close(descriptor)
        if not everywhere or memory is None:
            raise NotShared(f"ranks of this group cannot share {size} bytes of memory")
        region = Region(memory)
        self.regions.append(region)
        return region


def _size(region: Region) -> int:
    return len(region.memory)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Gather:
    """An all-gather whose output is shared by all ranks."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.memory.allocate(int(size[0]), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        return self.memory.meet("all_gather", output_tensor.nbytes)


class Reduce:
    """A reduce-scatter that sums what all ranks have written, in rank order."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory
        self.asked_for_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # torch allocates first the input, then the output.
        self.asked_for_input = not self.asked_for_input
        if self.asked_for_input:
            return self.memory.allocate(int(size[0]), dtype, parts=self.memory.size)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        parts = self.memory.shards(input_tensor, "reduce_scatter")
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor += part


def share_memory(units: Iterable[FSDPModule], group: dist.ProcessGroup) -> SharedMemory | None:
    """Make the FSDP ``units`` of ``group`` communicate through shared memory, which is returned, if its ranks
    can access it."""
    try:
        memory = SharedMemory(group)
    except NotShared:
        return None
    gather: Any = Gather(memory)  # torch's base classes of both are private
    reduce: Any = Reduce(memory)
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    return memory
