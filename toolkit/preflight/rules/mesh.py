"""Rules for the mesh: divisibility of the world size and the batch."""

from __future__ import annotations

import math
from itertools import product

from toolkit.errors import Problem, divisors, join_or, nearest_multiple
from toolkit.parallel.dims import DEGREES, ParallelDims
from toolkit.parallel.elastic_mesh import parse_mesh
from toolkit.preflight.planned_run import PlannedRun, rule

_SHOWN = 6
_MESHES = "parallelism.elastic_meshes"


@rule()
def world_fills_mesh(run: PlannedRun) -> list[Problem]:
    """Check that the degrees multiply to the world size."""
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
    fitting = "; ".join(str(mesh) for mesh in _fitting(asked, run.world_size)[:_SHOWN])
    return [run.problem(DEGREES["dp_shard"], rule, f"{start}, or for {run.world_size} use one of: {fitting}")]


def _fitting(asked: dict[str, int], world_size: int) -> list[ParallelDims]:
    """Return meshes of ``world_size`` that use only the techniques of ``asked``, most similar first."""
    meshes = [
        ParallelDims(pp, dp_replicate, world_size // (pp * dp_replicate * cp * tp), cp, tp)
        for pp, cp, tp in product(divisors(asked["pp"]), divisors(asked["cp"]), divisors(asked["tp"]))
        if world_size % (pp * cp * tp) == 0
        for dp_replicate in divisors(world_size // (pp * cp * tp))
    ]
    # Splitting the model is what makes it fit in memory, so those degrees are changed last.
    weights = {"pp": 4, "cp": 4, "tp": 4, "dp_replicate": 2, "dp_shard": 1}

    def distance(degrees: ParallelDims) -> float:
        kept = [name for name, size in asked.items() if size != -1]
        return sum(weights[name] * abs(math.log(getattr(degrees, name) / asked[name])) for name in kept)

    return sorted(meshes, key=distance)


@rule()
def batch_divides(run: PlannedRun) -> list[Problem]:
    """Check that the global batch divides evenly over the data-parallel ranks."""
    if run.mesh is None or run.batch:
        return []
    size, dp = run.config.training.global_batch_size, run.mesh.dp
    fitting = join_or(degree for degree in divisors(size) if degree <= run.world_size)
    fix = f"set it to {nearest_multiple(size, dp)}, or use a data-parallel degree of {fitting}"
    return [
        run.problem("training.global_batch_size", f"must be a multiple of the data-parallel degree {dp}", fix)
    ]


@rule()
def elastic_meshes_are_meshes(run: PlannedRun) -> list[Problem]:
    """Check that each entry is a list of mesh dimensions and sizes."""
    wrong = [text for text in run.config.parallelism.elastic_meshes if parse_mesh(text) is None]
    if not wrong:
        return []
    fix = f'write "dp_shard=3 tp=2": a size from 1 on for each of {join_or(DEGREES)} that is not 1'
    return [run.problem(_MESHES, f"{wrong[0]!r} is not a mesh", fix)]
