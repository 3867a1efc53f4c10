"""Rules for the mesh: divisibility of the world size and the batch."""

from __future__ import annotations

import math
from itertools import product

from toolkit.config.types import UnknownValue
from toolkit.errors import Problem, divisors, join_or, nearest_multiple
from toolkit.parallel.dims import DEGREES, ParallelDims
from toolkit.parallel.elastic_mesh import parse_mesh
from toolkit.preflight.planned_run import PlannedRun, rule

_SHOWN = 6
_MESHES = "parallelism.elastic_meshes"
_BATCH = "training.global_batch_size"
_BLAMED = ("dp_shard", "dp_replicate", "cp", "tp", "pp")
"""Degrees to blame for a mismatch, in order: splitting the model is what makes it fit in memory."""


@rule()
def world_fills_mesh(run: PlannedRun) -> list[Problem]:
    """Check that the product of the degrees is the world size."""
    if run.mesh:
        return []
    asked = {name: run.config.value(key) for name, key in DEGREES.items()}
    fixed = math.prod(size for size in asked.values() if size != -1)
    product_text = " × ".join(f"{name} {size}" for name, size in asked.items() if size != -1)
    if asked["dp_shard"] == -1:
        rule = f"{product_text} = {fixed} does not divide the world size {run.world_size}"
        start = f"start a multiple of {fixed} processes"
    else:
        rule = f"{product_text} = {fixed} is not the world size {run.world_size}"
        start = f"start {fixed} processes"
    options = run.config.parallelism
    experts = options.expert_parallel_degree * options.expert_tensor_parallel_degree
    fitting = "; ".join(str(mesh) for mesh in _fitting(asked, run.world_size, _heads(run), experts)[:_SHOWN])
    fix = f"{start}, or for {run.world_size} use one of: {fitting}"
    wrong = [name for name in _BLAMED if run.world_size % asked[name]]
    return [run.problem(run.blame(*(DEGREES[name] for name in wrong or _BLAMED)), rule, fix)]


def _heads(run: PlannedRun) -> int:
    """Return the number that the tensor-parallel degree must divide; 0 if the model is unknown."""
    try:
        return math.gcd(run.model.n_heads, run.model.n_kv_heads) if run.model else 0
    except UnknownValue:
        return 0


def _fitting(asked: dict[str, int], world_size: int, heads: int, experts: int) -> list[ParallelDims]:
    """Return meshes of ``world_size`` ranks that use only the dimensions in ``asked`` and fit ``experts``,
    the ranks among which experts are divided, most similar first.

    Degrees that divide the world size are kept if a mesh with all of them exists.
    """
    possible = divisors(world_size)
    near = {
        name: [size for size in possible if size == 1 or asked[name] / 2 <= size <= asked[name] * 2 > 2]
        for name in ("pp", "dp_replicate", "cp", "tp")
    }
    meshes = [
        ParallelDims(pp, dp_replicate, world_size // (pp * dp_replicate * cp * tp), cp, tp)
        for pp, dp_replicate, cp, tp in product(*near.values())
        if world_size % (pp * dp_replicate * cp * tp) == 0 and heads % tp == 0
    ]
    meshes = [it for it in meshes if it.dp_shard * it.cp * it.tp % experts == 0] or meshes
    weights = {"pp": 4, "cp": 4, "tp": 4, "dp_replicate": 2, "dp_shard": 1}

    def distance(degrees: ParallelDims) -> float:
        sizes = {name: size for name, size in asked.items() if size != -1}
        return sum(weights[name] * abs(math.log(getattr(degrees, name) / sizes[name])) for name in sizes)

    kept = [name for name, size in asked.items() if size > 1 and world_size % size == 0]
    keeping = [mesh for mesh in meshes if all(getattr(mesh, name) == asked[name] for name in kept)]
    return sorted(keeping or meshes, key=distance)


@rule()
def batch_divides(run: PlannedRun) -> list[Problem]:
    """Check that the global batch divides evenly over the data-parallel ranks."""
    if run.mesh is None or run.batch:
        return []
    size, dp = run.config.training.global_batch_size, run.mesh.dp
    fitting = join_or(divisors(math.gcd(size, run.world_size)))
    fix = f"set {_BATCH} to {nearest_multiple(size, dp)}, or use a data-parallel degree of {fitting}"
    rule = f"must be a multiple of the data-parallel degree {dp}"
    return [run.problem(_BATCH, rule, fix, *(DEGREES[name] for name in _BLAMED))]


@rule()
def elastic_meshes_are_meshes(run: PlannedRun) -> list[Problem]:
    """Check that each entry is a list of mesh dimensions and sizes."""
    wrong = [text for text in run.config.parallelism.elastic_meshes if parse_mesh(text) is None]
    if not wrong:
        return []
    fix = f'write "dp_shard=3 tp=2": a size from 1 on for each of {join_or(DEGREES)} that is not 1'
    return [run.problem(_MESHES, f"{wrong[0]!r} is not a mesh", fix)]
