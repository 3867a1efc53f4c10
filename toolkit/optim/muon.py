"""Muon for the matrices of the blocks, AdamW for all other parameters:
https://kellerjordan.github.io/posts/muon.

The update of a matrix is its momentum, orthogonalized by five Newton-Schulz iterations, which need the full
matrix. A stack of experts is one matrix per expert. With FSDP, replication, tensor or expert parallelism, one
rank owns each matrix: an all-to-all gathers the shards on the owner, and another returns the shards of the
update. Ownership is balanced by cost, and no work is duplicated. If balance permits, a rank owns the experts
that it stores whole. Communication and iterations use bfloat16, as in torch.optim.Muon: a rank sends about 4
bytes per step for each element that it stores, fewer with replicas. fp64 is kept, so that a layout can be
compared with a single process.

Momentum is sharded like its parameter, so a checkpoint can be resumed on any mesh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from toolkit.compat import flatten_mesh, shape_and_offset_at
from toolkit.config import Config
from toolkit.distributed.dtensor import clean_name, local
from toolkit.optim.optimizer import IMPLEMENTATIONS, AdamW, NamedParameters, parameter_groups
from toolkit.optim.optimizer_state import adam_state
from toolkit.optim.selection import beyond_adamw

_A, _B, _C = 3.4445, -4.775, 2.0315  # from the post
BUCKET = 1 << 25
"""Number of elements of full matrices that a rank gathers at a time, plus one matrix."""

Slices = tuple[slice, ...]
"""Slices of the experts, if they are stacked, of the rows and of the columns of a matrix on a rank."""


@dataclass(frozen=True)
class Matrix:
    """A parameter of a ``group``, or some experts of one in which they are stacked.

    Attributes:
        shape: (rows, columns), or (experts, rows, columns).
        mine: its index in this rank's shard of the parameter.
        owner: rank that orthogonalizes it.
        senders: ranks that send their shards: the owner's replica, which has each shard once.
        shards: slices of each rank of the mesh.
    """

    parameter: nn.Parameter
    group: dict[str, Any]
    shape: torch.Size
    mine: slice
    owner: int
    senders: frozenset[int]
    shards: Sequence[Slices]


class DistributedMuon(Optimizer):
    """torch.optim.Muon over ``groups`` of matrices, plain or DTensors, and AdamW over ``rest``.

    ``mesh`` is None for plain parameters; otherwise the meshes of all parameters have its ranks, in the same
    order. Construction and steps are collective over the mesh. Groups have the keys of torch.optim.Muon's
    groups, except ``ns_coefficients`` and ``eps``.
    """

    def __init__(self, groups: list[dict[str, Any]], rest: AdamW, mesh: DeviceMesh | None):
        adamw_groups = [group for group in rest.param_groups if group["params"] or not groups]
        super().__init__([*groups, *adamw_groups], {})
        rest.param_groups, rest.state = self.param_groups[len(groups) :], self.state
        self._rest, self.mesh = rest, mesh
        # Offloaded parameters are on the CPU, but are computed on the device.
        self._device = torch.device(mesh.device_type) if mesh is not None else None
        self._rank = mesh.mesh.flatten().tolist().index(dist.get_rank()) if mesh is not None else 0
        self._buckets = _assign_owners(self.param_groups[: len(groups)], mesh, self._rank)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update parameters that have gradients."""
        process_group = self._group  # created by all ranks, including those of stages without matrices
        if self._rest.param_groups:
            self._rest.step()
        for bucket in self._buckets:
            self._update([matrix for matrix in bucket if matrix.parameter.grad is not None], process_group)

    def fresh_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state before the first step: a matrix's momentum, or AdamW's moments."""
        if "momentum" not in group:
            return adam_state(parameter, group)
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in the all-to-alls of a step, including to itself."""
        total = 0
        for matrix in (matrix for bucket in self._buckets for matrix in bucket):
            elements = _size(matrix.shards[self._rank]) * (self._rank in matrix.senders)
            if matrix.owner == self._rank:
                elements += sum(map(_size, matrix.shards))
            total += elements * _precision(matrix.parameter).itemsize
        return total

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """Group of the mesh's ranks, created in the first step because planning a run needs no group."""
        if self.mesh is None or self.mesh.size() == 1:
            return None
        return (self.mesh if self.mesh.ndim == 1 else flatten_mesh(self.mesh)).get_group()

    def _update(self, matrices: Sequence[Matrix], process_group: dist.ProcessGroup | None) -> None:
        """Update ``matrices``, which are sorted by owner."""
        if not matrices:
            return
        rank, ranks = self._rank, range(len(matrices[0].shards))
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        directions = [self._direction(matrix) for matrix in matrices]
        like = directions[0].new_empty(0)
        incoming = [(source, matrix) for source in ranks for matrix in owned if source in matrix.senders]
        received = _exchange(
            process_group,
            [(it.owner, shard) for it, shard in zip(matrices, directions, strict=True) if rank in it.senders],
            [(source, _size(matrix.shards[source])) for source, matrix in incoming],
            like,
        )
        del directions
        full = {id(matrix): like.new_empty(matrix.shape) for matrix in owned}
        for (source, matrix), values in zip(incoming, received, strict=True):
            shard = full[id(matrix)][matrix.shards[source]]
            shard.copy_(values.view(shard.shape))
        updates = [(it, orthogonalize(full.pop(id(it)), it.group["ns_steps"])) for it in owned]
        received = _exchange(
            process_group,
            [(target, update[it.shards[target]]) for target in ranks for it, update in updates],
            [(matrix.owner, _size(matrix.shards[rank])) for matrix in matrices],
            like,
        )
        for matrix, values in zip(matrices, received, strict=True):
            group, parameter = matrix.group, local(matrix.parameter)[matrix.mine]
            rate = group["lr"] * _lr_ratio(matrix.shape, group["adjust_lr_fn"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(values.view(parameter.shape).to(parameter.device), alpha=-rate)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Update the momentum and return this rank's shard of the matrix to orthogonalize, on the mesh's
        device."""
        parameter, group = matrix.parameter, matrix.group
        state = self.state[parameter]
        if not state:
            state.update(self.fresh_state(parameter, group))
        gradient: Tensor = local(parameter.grad)[matrix.mine]  # type: ignore[arg-type]
        momentum = local(state["momentum_buffer"])[matrix.mine]
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return direction.to(self._device, _precision(parameter))


def _exchange(
    group: dist.ProcessGroup | None,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, int]],
    like: Tensor,
) -> Sequence[Tensor]:
    """Exchange tensors in one all-to-all, where ``sends`` are (target, tensor) and ``receives`` (source,
    size), both sorted by rank. Returns the received tensors, flat, with the dtype and device of ``like``."""
    sent = torch.cat([like, *(tensor.reshape(-1) for _, tensor in sends)])
    sizes = [size for _, size in receives]
    if group is None:
        return sent.split(sizes)
    received, outgoing, incoming = like.new_empty(sum(sizes)), [0] * group.size(), [0] * group.size()
    for target, tensor in sends:
        outgoing[target] += tensor.numel()
    for source, size in receives:
        incoming[source] += size
    dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
    return received.split(sizes)


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a matrix, or of each of a stack, near 1, like torch.optim.Muon, in the
    dtype of ``x``."""
    is_tall = x.shape[-2] > x.shape[-1]
    norm = x.flatten(-2).norm(dim=-1)[..., None, None]
    x = x.mT if is_tall else x
    x = x / norm.clamp(min=1e-7)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


def _lr_ratio(shape: torch.Size, adjust: str) -> float:
    """Return torch.optim.Muon's learning-rate factor for a matrix of this shape."""
    rows, columns = shape[-2:]
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _precision(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.bfloat16


def _assign_owners(
    groups: Iterable[dict[str, Any]], mesh: DeviceMesh | None, rank: int
) -> list[list[Matrix]]:
    """Assign each matrix, stacks first and then in order of decreasing cost, to the rank with the least work
    so far; among several, to one that stores the whole matrix. Returns buckets, each sorted by owner."""
    ranks = mesh.size() if mesh is not None else 1
    work, elements = ([0] * ranks for _ in range(2))
    buckets: dict[int, list[Matrix]] = defaultdict(list)
    parameters = [(parameter, group) for group in groups for parameter in group["params"]]
    for parameter, group in sorted(parameters, key=lambda it: (-it[0].ndim, -_cost(it[0].shape))):
        mesh_shape: tuple[int, ...] = (1,)
        placements: tuple[Placement, ...] = ()
        if mesh is not None:
            assert torch.equal(parameter.device_mesh.mesh.flatten(), mesh.mesh.flatten())
            mesh_shape, placements = tuple(parameter.device_mesh.shape), tuple(parameter.placements)
        for shape, mine, shards in _chunks(parameter.shape, mesh_shape, placements, rank, BUCKET):
            whole, cost = math.prod(shape), _cost(shape)
            owner = min(range(ranks), key=lambda it: (work[it], _size(shards[it]) < whole))  # noqa: B023
            senders = _senders(mesh_shape, placements, owner)
            matrix = Matrix(parameter, group, shape, mine, owner, senders, shards)
            buckets[elements[owner] // BUCKET].append(matrix)
            work[owner] += cost
            elements[owner] += whole
    return [sorted(buckets[number], key=lambda it: it.owner) for number in sorted(buckets)]


def _cost(shape: torch.Size) -> int:
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * short**2 * (2 * long + short)


@cache
def _chunks(
    shape: torch.Size, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], rank: int, largest: int
) -> list[tuple[torch.Size, slice, list[Slices]]]:
    """Return the shape, ``mine`` and ``shards`` of each :class:`Matrix` of a parameter: a stack of experts is
    divided as FSDP over all ranks would do, or into chunks of at most ``largest`` elements."""
    shards = []
    for coordinate in product(*map(range, mesh_shape)):
        size, start = shape_and_offset_at(shape, mesh_shape, list(coordinate), placements)
        shards.append(tuple(slice(first, first + count) for first, count in zip(start, size, strict=True)))
    if len(shape) == 2:
        return [(shape, slice(None), shards)]
    step = min(math.ceil(shape[0] / len(shards)), max(1, largest // math.prod(shape[1:])))
    chunks = []
    for first in range(0, shape[0], step):
        count, mine = min(step, shape[0] - first), shards[rank][0]
        inside = [(_within(experts, first, count), *matrix) for experts, *matrix in shards]
        offset = first - mine.start
        its = slice(inside[rank][0].start + offset, inside[rank][0].stop + offset)
        chunks.append((torch.Size((count, *shape[1:])), its, inside))
    return chunks


def _within(experts: slice, first: int, count: int) -> slice:
    """Return the experts in ``experts`` among the ``count`` experts from ``first`` on."""
    start, stop = (min(max(it - first, 0), count) for it in (experts.start, experts.stop))
    return slice(start, stop)


@cache
def _senders(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], owner: int) -> frozenset[int]:
    coordinates = list(product(*map(range, mesh_shape)))
    replicated = [dimension for dimension, it in enumerate(placements) if it.is_replicate()]
    return frozenset(
        rank
        for rank, coordinate in enumerate(coordinates)
        if all(coordinate[dimension] == coordinates[owner][dimension] for dimension in replicated)
    )


def _size(slices: Slices) -> int:
    return math.prod(it.stop - it.start for it in slices)


def build(parameters: NamedParameters, config: Config) -> DistributedMuon:
    """Build the optimizer of a run. Muon updates the matrices of the blocks, including stacked experts; AdamW
    updates all other parameters, including those of adapters and of groups that ask for it."""
    options = config.optimizer
    named = [(clean_name(name), parameter) for name, parameter in parameters]
    groups: dict[bool, list[dict]] = {
        is_matrix: parameter_groups(
            [it for it in named if beyond_adamw(it[0], it[1].shape, options) == is_matrix], config
        )
        for is_matrix in (True, False)
    }
    rest = AdamW(
        groups[False],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        **IMPLEMENTATIONS[options.implementation],
    )
    muon_options = options.muon.model_dump()
    matrices = [{**group, **muon_options} for group in groups[True] if group["params"]]
    meshes = [it.device_mesh for _, it in named if isinstance(it, DTensor)]
    return DistributedMuon(matrices, rest, meshes[0] if meshes else None)
