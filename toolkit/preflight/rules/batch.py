"""Rules about the batch: what it must divide into."""

from __future__ import annotations

from toolkit.errors import Problem, divisors, either, nearest_multiple
from toolkit.preflight.planned_run import PlannedRun, rule


@rule()
def batch_divides(run: PlannedRun) -> list[Problem]:
    """A global batch has equal parts on the data-parallel ranks."""
    if run.mesh is None or run.batch:
        return []
    size, dp = run.config.training.global_batch_size, run.mesh.dp
    fitting = either(degree for degree in divisors(size) if degree <= run.world_size)
    fix = f"set it to {nearest_multiple(size, dp)}, or use a data-parallel degree of {fitting}"
    return [
        run.problem("training.global_batch_size", f"must be a multiple of the data-parallel degree {dp}", fix)
    ]
