"""Sums over micro-batches and ranks in an order that the number of data-parallel ranks does not change.

The micro-batches of a global batch are numbered: micro-batch j of data-parallel rank r of R has the index
j·R + r. Gradients are the leaves of one binary tree over this index, the tree of a binary counter: sums of
2^k leaves are added in pairs. In place of a reduce-scatter, an all-to-all sends each rank its shard of the
gradients of all ranks, at the same bytes, and the rank adds them one by one to its tree. So each rank stores
at most log2 of the number of micro-batches partial sums of its shard, and no size of the mesh appears in the
order of additions. Under context parallelism, the ranks that share a sequence are adjacent leaves.

With replicas, each of R replicas sums a part of the shard; FSDP's all-reduce adds zeros to it from the
others, which is exact.

Other sums are exact or have a fixed order as well. Losses and counts are summed from a table with one row for
each micro-batch. Squares of gradients are summed for each row of a parameter, which no rank shares with
another, and then over a table of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from toolkit.compat import flatten_mesh
from toolkit.cpu.shared_memory import SharedMemory
from toolkit.distributed import collectives
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.distributed.seeds import seed_step
from toolkit.hardware import is_simulated
from toolkit.parallel.mesh import Mesh

_CHUNK = 1 << 17
"""Number of elements in fp64 at a time."""


class PairwiseSum:
    """The sum of tensors that are added one by one, along the tree of a binary counter."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensor]] = []  # log2 of the leaves, and their sum; largest first

    def add(self, leaf: Tensor) -> None:
        """Add a leaf; its storage may be reused afterwards."""
        level, total, owned = 0, leaf, False
        while self._partial and self._partial[-1][0] == level:
            _, before = self._partial.pop()
            total, owned, level = before.add_(total), True, level + 1
        self._partial.append((level, total if owned else total.clone()))

    def take(self) -> Tensor:
        """Return the sum of all leaves, at least one, and reset."""
        _, total = self._partial.pop()
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total.add_(0.0)  # -0 becomes 0, as where a zero is added to it


class OrderedReduceScatter:
    """FSDP's reduce-scatter of one unit, as an all-to-all and a :class:`PairwiseSum`.

    Its output is 0 but for the last micro-batch, when it is the sum of all of them: FSDP adds up the outputs.
    """

    def __init__(self, mesh: DeviceMesh, sums: BitwiseSums, memory: SharedMemory | None):
        ranks = flatten_mesh(mesh) if mesh.ndim > 1 else mesh
        self.group, self.sums = ranks.get_group(), sums
        self.shards = mesh.size(mesh.ndim - 1)
        self.replicas = mesh.size() // self.shards
        self.memory = memory if self.replicas == 1 else None
        self.tree = PairwiseSum()
        self.input: Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        # torch allocates first the input, which it fills, then the output.
        if self.input is None:
            if self.memory is not None:
                self.input = self.memory.allocate(int(size[0]), dtype, parts=self.shards)
            else:
                self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        filled, self.input = self.input, None
        if self.shards > 1:
            return torch.empty(*size, dtype=dtype, device=device)
        self._sum(filled, filled)  # torch does not call a reduce-scatter of one rank
        return filled

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        self._sum(input_tensor, output_tensor)

    def _sum(self, gradients: Tensor, output: Tensor) -> None:
        """Add the gradients (shards · n,) of all ranks to the tree; write this rank's n sums."""
        for leaf in self.memory.shards(gradients, "all_to_all") if self.memory else self._exchange(gradients):
            self.tree.add(leaf)
        output.zero_()
        if self.sums.last:
            total = self.tree.take()
            mine = output[self.group.rank() // self.shards * len(total) :][: len(total)]
            mine.copy_(total[: len(mine)])

    def _exchange(self, gradients: Tensor) -> Iterable[Tensor]:
        """Return the part of the gradients that this rank sums, of every rank."""
        if self.shards * self.replicas == 1:
            return [gradients]
        count = len(gradients) // self.shards
        part = -(-count // self.replicas)
        padded_SN = F.pad(gradients.view(self.shards, count), (0, self.replicas * part - count))
        sent = padded_SN.view(self.shards, self.replicas, part).transpose(0, 1).reshape(-1, part)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        assert work is not None
        collectives.wait_for_work(work)
        return received


class BitwiseSums:
    """Bitwise equal sums of the gradients of a step.

    Attributes:
        last: whether the gradients that are reduced next are the last ones of the step.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        cp = mesh.cp.size() if mesh.cp else 1
        self._leaves = mesh.dp_size * cp
        self._leaf = mesh.dp_rank * cp + (mesh.cp.get_local_rank() if mesh.cp else 0)
        of_stage = mesh.world.mesh_dim_names[1:] if mesh.pp and mesh.world.mesh_dim_names else ()
        self._stage_group = flatten_mesh(mesh.world[of_stage]).get_group() if of_stage else None
        self.last, self._seed = True, 0

    def begin_step(self) -> None:
        """Note the seed of the step, which is the same on all ranks."""
        self._seed = torch.initial_seed()

    def seed(self, batch: int, part: int = 0) -> None:
        """Draw the random numbers of a part of this rank's ``batch`` by its index in the global batch."""
        seed_step(self._seed, batch * self.mesh.dp_size + self.mesh.dp_rank, part)

    def reduce_scatter(self, mesh: DeviceMesh, memory: SharedMemory | None) -> OrderedReduceScatter:
        """Return the reduce-scatter of an FSDP unit on ``mesh``, through shared ``memory`` if there is
        any."""
        return OrderedReduceScatter(mesh, self, memory)

    def total(self, rows: Tensor) -> Tensor:
        """Sum the rows (micro-batches, values) of all ranks: (values,). All but one rank of a tp group
        have zeros."""
        table = rows.new_zeros(len(rows), self._leaves, rows.shape[1])
        table[:, self._leaf] = rows
        dist.all_reduce(table)
        return table.flatten(0, 1).sum(0)

    def exact_total(self, rows: Tensor) -> Tensor:
        """Do the same for any division into micro-batches: sums are rounded once, which takes the host."""
        size, group = dist.get_world_size(), dist.group.WORLD
        assert group is not None
        gathered = collectives.all_gather(rows, size, group.group_name)
        return rows.new_tensor([math.fsum(column) for column in gathered.T.tolist()])

    def norm(self, parameters: Iterable[nn.Parameter], *, device: torch.device) -> Tensor:
        """Return the 2-norm of the gradients of all ranks, an fp64 scalar on ``device``."""
        world = self.mesh.world
        first_replica, tp_rank = world.get_local_rank("dp_replicate") == 0, world.get_local_rank("tp")
        squares = []
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            shard, offset = shard_and_offset(gradient)
            if is_simulated():  # the offset is computed by tensors, which have no values then
                offset = (0,) * gradient.ndim
            # A column of the table for each tp rank: parts of a row, or equal copies of it.
            shape = (world["tp"].size(), *(gradient.shape[:-1] or gradient.shape))
            table = torch.zeros(shape, dtype=torch.float64, device=device)
            if first_replica and shard.numel():
                sums = row_squares(shard[:, None] if shard.ndim == 1 else shard).to(device)
                part = table[tp_rank]
                for dim, size in enumerate(sums.shape):
                    part = part.narrow(dim, offset[dim], size)
                part.copy_(sums / _tp_copies(gradient))
            squares.append(table.flatten(1))
        whole = torch.cat(squares, 1)
        dist.all_reduce(whole, group=self._stage_group)
        total = whole.sum()
        if (pp := self.mesh.pp) is not None:  # stages have other parameters each
            group = pp.get_group()
            total = collectives.all_gather(total[None], pp.size(), group.group_name).sum()
        return total.sqrt()


def _tp_copies(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor) or "tp" not in (names := gradient.device_mesh.mesh_dim_names or ()):
        return 1
    dim = names.index("tp")
    return gradient.device_mesh.size(dim) if gradient.placements[dim].is_replicate() else 1


def row_squares(rows: Tensor) -> Tensor:
    """Return the sums of squares over the last dimension, fp64; a row's does not depend on the other rows."""
    width, flat_RC = rows.shape[-1], rows.flatten(0, -2)
    if is_simulated():
        return rows.sum(-1, dtype=torch.float64)
    if rows.is_cuda:
        return _exact_row_squares(flat_RC).view(rows.shape[:-1])
    count = max(1, _CHUNK // width)
    buffer = torch.empty(count * width, dtype=torch.float64)
    sums = []
    for part_RC in flat_RC.split(count):
        exact_RC = buffer[: part_RC.numel()].view_as(part_RC).copy_(part_RC)
        sums.append(exact_RC.square_().sum(1))
    return torch.cat(sums).view(rows.shape[:-1])


def _exact_row_squares(rows_RC: Tensor) -> Tensor:
    """Return sums that no order of additions changes: kernels of CUDA choose one by the number of rows.

    Squares are rounded to multiples of a power of two that is so large, relative to the largest of the row,
    that their sums are exact.
    """
    squares_RC = rows_RC.double().square_()
    _, exponent_R1 = torch.frexp(squares_RC.amax(1, keepdim=True) * squares_RC.shape[1])
    # Adding 1.5 · 2^e leaves 52 bits after the leading one, so rounds to multiples of 2^(e - 52).
    grid_R1 = torch.ldexp(torch.full_like(squares_RC[:, :1], 1.5), exponent_R1 + 1)
    return squares_RC.add_(grid_R1).sub_(grid_R1).sum(1)
