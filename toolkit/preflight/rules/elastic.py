"""Rules about the meshes of a run whose number of nodes may change."""

from __future__ import annotations

from toolkit.errors import Problem, either
from toolkit.parallel.dims import DEGREES
from toolkit.parallel.elastic_mesh import elastic_mesh
from toolkit.preflight.planned_run import PlannedRun, rule

_MESHES = "parallelism.elastic_meshes"


@rule()
def elastic_meshes_are_meshes(run: PlannedRun) -> list[Problem]:
    """Each is a text of names and sizes."""
    wrong = [text for text in run.config.parallelism.elastic_meshes if elastic_mesh(text) is None]
    if not wrong:
        return []
    fix = f'write "dp_shard=3 tp=2": a size from 1 on for each of {either(DEGREES)} that is not 1'
    return [run.problem(_MESHES, f"{wrong[0]!r} is no mesh", fix)]
