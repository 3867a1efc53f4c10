"""Muon for the matrices of the blocks, AdamW for all else: https://kellerjordan.github.io/posts/muon.

An update of a matrix is its momentum with all singular values brought near 1, by five Newton-Schulz
iterations, which take the whole matrix. FSDP, replicas and tensor parallelism leave a rank a part of it: the
parts meet on one rank, its owner, and the parts of the update go back, an all-to-all each way. Every rank
that has parts owns some matrices, of about the same work, so that none computes what another does. What is
sent and iterated on has 16 bits, as in torch.optim.Muon: a rank sends some 4 bytes in a step for each number
that it stores, fewer with replicas. fp64 stays fp64, so that a layout can be compared with one process.

Momentum is cut over the mesh as its parameter is: any mesh goes on from a checkpoint of any other.
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

_A, _B, _C = 3.4445, -4.775, 2.0315  # of the post
BUCKET = 1 << 25
"""Numbers of whole matrices that a rank takes in at once, and one matrix more."""

Part = tuple[slice, slice]
"""Rows and columns of a matrix that a rank has."""


@dataclass(frozen=True)
class Matrix:
    """A parameter of a ``group``, of which each rank of the mesh has one of ``parts``.

    The rank ``owner`` iterates on it; ``senders`` have together each part once, those of the owner's replica.
    """

    parameter: nn.Parameter
    group: dict[str, Any]
    owner: int
    senders: frozenset[int]
    parts: Sequence[Part]


class Muon(Optimizer):
    """torch.optim.Muon over ``groups`` of matrices, plain or DTensors of one mesh, and the steps of ``rest``.

    ``mesh`` is None for plain parameters; all of its ranks make and step the optimizer together. Groups have
    the keys of torch.optim.Muon's, without ``ns_coefficients`` and ``eps``.
    """

    def __init__(self, groups: list[dict[str, Any]], rest: AdamW, mesh: DeviceMesh | None):
        theirs = [group for group in rest.param_groups if group["params"] or not groups]
        super().__init__([*groups, *theirs], {})
        rest.param_groups, rest.state = self.param_groups[len(groups) :], self.state
        self._rest, self.mesh = rest, mesh
        # Where parameters are offloaded, their own device is the CPU.
        self._device = torch.device(mesh.device_type) if mesh is not None else None
        self._rank = mesh.mesh.flatten().tolist().index(dist.get_rank()) if mesh is not None else 0
        self._buckets = _shared_out(self.param_groups[: len(groups)], mesh)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        process_group = self._group  # which all ranks make together, also those of stages without matrices
        if self._rest.param_groups:
            self._rest.step()
        for bucket in self._buckets:
            self._update([matrix for matrix in bucket if matrix.parameter.grad is not None], process_group)

    def fresh_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: a matrix has momentum, all else AdamW's moments."""
        if "momentum" not in group:
            return adam_state(parameter, group)
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank gives to the all-to-alls of a step, its own parts among them."""
        total = 0
        for matrix in (matrix for bucket in self._buckets for matrix in bucket):
            numbers = _size(matrix.parts[self._rank]) * (self._rank in matrix.senders)
            if matrix.owner == self._rank:
                numbers += sum(map(_size, matrix.parts))
            total += numbers * _precision(matrix.parameter).itemsize
        return total

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks of the mesh, made in the first step: to plan a run takes no group."""
        if self.mesh is None or self.mesh.size() == 1:
            return None
        return (self.mesh if self.mesh.ndim == 1 else flatten_mesh(self.mesh)).get_group()

    def _update(self, matrices: Sequence[Matrix], process_group: dist.ProcessGroup | None) -> None:
        """Update ``matrices``, which are in the order of their owners."""
        if not matrices:
            return
        rank, ranks = self._rank, range(len(matrices[0].parts))
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        directions = [self._direction(matrix) for matrix in matrices]
        like = directions[0].new_empty(0)
        arriving = [(source, matrix) for source in ranks for matrix in owned if source in matrix.senders]
        parts = _exchange(
            process_group,
            [(it.owner, part) for it, part in zip(matrices, directions, strict=True) if rank in it.senders],
            [(source, _size(matrix.parts[source])) for source, matrix in arriving],
            like,
        )
        del directions
        wholes = {id(matrix): like.new_empty(matrix.parameter.shape) for matrix in owned}
        for (source, matrix), numbers in zip(arriving, parts, strict=True):
            part = wholes[id(matrix)][matrix.parts[source]]
            part.copy_(numbers.view(part.shape))
        updates = [(it, orthogonalize(wholes.pop(id(it)), it.group["ns_steps"])) for it in owned]
        parts = _exchange(
            process_group,
            [(target, update[it.parts[target]]) for target in ranks for it, update in updates],
            [(matrix.owner, _size(matrix.parts[rank])) for matrix in matrices],
            like,
        )
        for matrix, numbers in zip(matrices, parts, strict=True):
            group, parameter = matrix.group, local(matrix.parameter)
            rate = group["lr"] * _ratio(matrix.parameter.shape, group["adjust_lr_fn"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(numbers.view(parameter.shape).to(parameter.device), alpha=-rate)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Step the momentum; return this rank's part of what is to be orthogonal, on the mesh's device."""
        parameter, group = matrix.parameter, matrix.group
        state = self.state[parameter]
        if not state:
            state.update(self.fresh_state(parameter, group))
        gradient, momentum = local(parameter.grad), local(state["momentum_buffer"])  # type: ignore[arg-type]
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return direction.to(self._device, _precision(parameter))


def _exchange(
    group: dist.ProcessGroup | None,
    gives: Sequence[tuple[int, Tensor]],
    takes: Sequence[tuple[int, int]],
    like: Tensor,
) -> Sequence[Tensor]:
    """Send tensors to ranks, in the order of ranks; return what comes, flat and ``like`` another tensor, by
    ranks and sizes of the same order."""
    given = torch.cat([like, *(tensor.reshape(-1) for _, tensor in gives)])
    sizes = [size for _, size in takes]
    if group is None:
        return given.split(sizes)
    taken, outgoing, incoming = like.new_empty(sum(sizes)), [0] * group.size(), [0] * group.size()
    for target, tensor in gives:
        outgoing[target] += tensor.numel()
    for source, size in takes:
        incoming[source] += size
    dist.all_to_all_single(taken, given, incoming, outgoing, group=group)
    return taken.split(sizes)


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a matrix near 1, as torch.optim.Muon does, in the precision of ``x``."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def _ratio(shape: torch.Size, adjust: str) -> float:
    """By what torch.optim.Muon multiplies the rate for a matrix of this shape."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _precision(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.bfloat16


def _shared_out(groups: Iterable[dict[str, Any]], mesh: DeviceMesh | None) -> list[list[Matrix]]:
    """Give each matrix an owner, the costliest first to who has least to do, and put them into buckets, each
    in the order of owners."""
    shape = tuple(mesh.shape) if mesh is not None else (1,)
    work, held = ([0] * math.prod(shape) for _ in range(2))
    buckets: dict[int, list[Matrix]] = defaultdict(list)
    parameters = [(parameter, group) for group in groups for parameter in group["params"]]
    for parameter, group in sorted(parameters, key=lambda it: -_cost(it[0].shape)):
        owner = work.index(min(work))
        assert mesh is None or parameter.device_mesh == mesh
        placements = tuple(parameter.placements) if mesh is not None else ()
        senders, parts = _senders(shape, placements, owner), _parts(parameter.shape, shape, placements)
        buckets[held[owner] // BUCKET].append(Matrix(parameter, group, owner, senders, parts))
        work[owner] += _cost(parameter.shape)
        held[owner] += parameter.numel()
    return [sorted(buckets[number], key=lambda it: it.owner) for number in sorted(buckets)]


def _cost(shape: torch.Size) -> int:
    short, long = sorted(shape)
    return short**2 * (2 * long + short)


@cache
def _parts(shape: torch.Size, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[Part]:
    found = []
    for place in product(*map(range, mesh_shape)):
        size, start = shape_and_offset_at(shape, mesh_shape, list(place), placements)
        rows, columns = (slice(first, first + count) for first, count in zip(start, size, strict=True))
        found.append((rows, columns))
    return found


@cache
def _senders(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], owner: int) -> frozenset[int]:
    places = list(product(*map(range, mesh_shape)))
    copied = [dimension for dimension, it in enumerate(placements) if it.is_replicate()]
    return frozenset(
        rank
        for rank, place in enumerate(places)
        if all(place[dimension] == places[owner][dimension] for dimension in copied)
    )


def _size(part: Part) -> int:
    rows, columns = part
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def build(parameters: NamedParameters, config: Config) -> Muon:
    """Build the optimizer of a run. Muon has the weights of linear layers of the blocks; what an adapter adds
    to them is no matrix of the model, and AdamW's."""
    options = config.optimizer
    named = [(clean_name(name), parameter) for name, parameter in parameters]
    groups: dict[bool, list[dict]] = {
        is_matrix: parameter_groups(
            [(name, it) for name, it in named if _is_matrix(name, it) == is_matrix],
            weight_decay=options.weight_decay,
            no_decay=options.no_decay,
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
    own = {"lr": options.lr, **options.muon.model_dump()}
    matrices = [{**group, **own} for group in groups[True] if group["params"]]
    meshes = [it.device_mesh for _, it in named if isinstance(it, DTensor)]
    return Muon(matrices, rest, meshes[0] if meshes else None)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and name.endswith(".weight") and parameter.ndim == 2
