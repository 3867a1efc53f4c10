"""FSDP's gathers and reductions through memory that ranks of a machine share, instead of gloo's sockets.

A gather has one region: each rank copies its shards into it and reads all of them. A reduction has a region
with a part for each rank: each writes its gradients into its own and adds up its shard of all parts, in the
order of ranks. A small all-reduce, the barrier, says that all have written.

Regions are kept and used again. One is free when at a barrier no rank has its tensor any more, so that all
ranks know the same regions as free and take the same one next. Where torch asks for parameters ahead, the
barrier of their gather continues while the unit before is computed.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from toolkit.distributed.collectives import wait_for_work

_ENOUGH = 3
"""Regions: of a unit that is gathered, the next one, and a reduction."""


class NotShared(Exception):
    """A rank of the group cannot read the memory of another."""


@dataclass
class Region:
    """Memory of all ranks of a group, and the buffer of the tensor that this rank was last given of it."""

    memory: mmap.mmap
    tensor: weakref.ref[memoryview] | None = None
    free: bool = True  # on all ranks
    given: int = 0  # barriers that began before it was returned last


class GatherBarrier(dist.Work):
    """An all-reduce that says that all ranks are at an operation, which tells what regions they hold."""

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
        """Wait until all ranks are there.

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
    """The regions of the ranks of ``group``.

    Raises:
        NotShared: its ranks are not all on one machine, or must not see one another's memory there.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.regions: list[Region] = []
        self.barriers = 0
        self.open: list[GatherBarrier] = []
        """Meetings that began and were not waited for."""
        self.last = self._add(mmap.PAGESIZE)
        """The region returned last."""

    def allocate(self, count: int, dtype: torch.dtype, *, parts: int = 1) -> Tensor:
        """A tensor (count,) of the first of ``parts`` parts of a free region, or of this rank's."""
        size = _whole_pages(count * dtype.itemsize)
        region = self._take(size * parts)
        start = size * self.rank if parts > 1 else 0
        # A tensor keeps the buffer that it is made from alive, and a view of it the storage.
        buffer = memoryview(region.memory)[start : start + max(count, 1) * dtype.itemsize]
        region.tensor, region.free, region.given = weakref.ref(buffer), False, self.barriers
        self.last = region
        return torch.frombuffer(buffer, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)

    def part(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """The tensor (count,) of another rank in the region that was last returned."""
        start = _whole_pages(count * dtype.itemsize) * rank
        return torch.frombuffer(self.last.memory, dtype=dtype, count=count, offset=start)

    def meet(self, operation: str, size: int) -> GatherBarrier:
        """Begin a barrier at an operation of ``size`` bytes."""
        barrier = GatherBarrier(self, operation, size)
        self.barriers += 1
        self.open.append(barrier)
        return barrier

    def _take(self, size: int) -> Region:
        """The smallest free region of ``size`` bytes, or a new one instead of the smallest free one."""
        if not self._fitting(size) and self.open:
            self.open[-1].wait()
        if not self._fitting(size) and len(self.regions) < _ENOUGH:
            return self._add(size)
        if not self._fitting(size):
            self.meet("allocate", size).wait()  # what has been dropped since the last one may be enough
        if fitting := self._fitting(size):
            return min(fitting, key=_size)
        if free := self._fitting(0):
            self.regions.remove(min(free, key=_size))
        return self._add(size)

    def _fitting(self, size: int) -> list[Region]:
        return [region for region in self.regions if region.free and _size(region) >= size]

    def _add(self, size: int) -> Region:
        """Map new memory that the first rank of the group makes and the others open.

        An open file of a process is found by their numbers; random bytes in it say that it is the one that
        is meant, for other machines and containers have the same numbers.
        """
        mark, descriptor, memory = os.urandom(16), -1, None
        if self.rank == 0:
            with suppress(OSError, AttributeError):  # forbidden in some containers, and Linux's alone
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
    """An all-gather whose output is common to all ranks."""

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
    """A reduce-scatter that sums what all ranks have written, in the order of ranks."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory
        self.asked_for_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # torch asks for the input, and then for the output.
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
        memory, shard = self.memory, output_tensor.numel()
        memory.meet("reduce_scatter", input_tensor.nbytes).wait()
        parts = [
            memory.part(rank, input_tensor.numel(), input_tensor.dtype).narrow(0, memory.rank * shard, shard)
            for rank in range(memory.size)
        ]
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor += part
        # torch holds the input until the next reduction; by the next barrier nobody reads it.
        memory.last.tensor = None


def share_memory(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the FSDP units of ``model`` communicate through memory that ``group`` shares, if its ranks can."""
    try:
        memory = SharedMemory(group)
    except NotShared:
        return
    gather: Any = Gather(memory)  # torch names the classes of both in private
    reduce: Any = Reduce(memory)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
