"""Rules about the stages of a pipeline: how many there are, and what each of them holds."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from toolkit.errors import Problem, did_you_mean, either, first_few
from toolkit.parallel.pipeline_schedules import (
    SCHEDULES,
    Schedule,
    is_cut,
    module_names,
)
from toolkit.preflight.planned_run import PlannedRun, rule

_DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_PARTS = "parallelism.module_fqns_per_model_part"
_ENDS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
"""What the embedding and the head count as."""
_SHOWN = 4


@rule()
def schedule_takes_stages(run: PlannedRun) -> list[Problem]:
    """A schedule runs one stage on a rank, or two, or any number of them."""
    if run.stages is None or run.model is None:
        return []
    count, name = len(run.stages.modules), run.config.parallelism.pipeline_parallel_schedule
    if run.schedule.takes_stages(count, run.pp):
        return []
    by_hand = run.config.parallelism.module_fqns_per_model_part is not None
    said = f"names {count} stages" if by_hand else f"makes {count} stages of {run.model.n_layers} layers"
    needs = _needs(run.schedule, run.pp)
    fix = f"name {needs}" if by_hand else f"remove it for {run.schedule.stages * run.pp} stages"
    others = [other for other, schedule in SCHEDULES.items() if schedule.takes_stages(count, run.pp)]
    if others:
        fix += f", or set {_SCHEDULE} to {either(others)}"
    rule = f"{said}, but {name} on {run.pp} ranks takes {needs}"
    return [run.problem(_PARTS if by_hand else _PER_STAGE, rule, fix)]


def _needs(schedule: Schedule, pp: int) -> str:
    if schedule.more:
        return f"{schedule.stages * pp} or a larger multiple of {pp}"
    return f"{schedule.stages * pp}, {'two' if schedule.stages == 2 else 'one'} a rank"


@rule()
def stages_hold_something(run: PlannedRun) -> list[Problem]:
    """Each stage has a block, the embedding or the head, and neither of these counts for more than its stage
    has room."""
    options = run.config.parallelism
    if run.stages is None or run.model is None or options.module_fqns_per_model_part is not None:
        return []
    count, n_layers = len(run.stages.modules), run.model.n_layers
    if is_cut(run.stages.modules, n_layers) or not run.schedule.takes_stages(count, run.pp):
        return []
    key = _DEGREE if options.pipeline_parallel_layers_per_stage is None else _PER_STAGE
    first, last = (getattr(options, name) for name in _ENDS)
    empty = [str(stage) for stage, part in enumerate(run.stages.modules) if not part]
    rule = f"{count} stages of {n_layers} layers leave nothing to stage {first_few(empty, _SHOWN)}"
    if not empty:
        rule = f"{count} stages of {n_layers} layers have no room for ends that count for so many"
    if first or last:
        rule += f", where the embedding counts as {first} and the head as {last}"
    most = (n_layers + first + last) // max(1, first, last) // run.schedule.stages
    fix = f"set it to at most {max(1, most)}" if key == _DEGREE else "raise it"
    if max(first, last) > 1:
        fix += f", or lower parallelism.{_ENDS[first < last]}"
    return [run.problem(key, rule, fix)]


@rule()
def parts_are_a_cut(run: PlannedRun) -> list[Problem]:
    """Stages named by hand hold each module once, in the order of the forward."""
    parts = run.config.parallelism.module_fqns_per_model_part
    if parts is None or run.model is None:
        return []
    order = {name: place for place, name in enumerate(module_names(run.model.n_layers))}
    given = [name for part in parts for name in part]
    known, times = [name for name in given if name in order], Counter(given)
    wrong = {
        "the model has no": [name for name in given if name not in order],
        "no stage holds": [name for name in order if name not in times],
        "named more than once:": [name for name in order if times[name] > 1],
        "nothing is in stage": [str(stage) for stage, part in enumerate(parts) if not part],
        "out of order:": [after for before, after in pairwise(known) if order[after] < order[before]],
        "computed as one, and in two stages:": ["norm and output"]
        if any(("norm" in part) != ("output" in part) for part in parts)
        else [],
    }
    if not any(wrong.values()):
        return []
    rule = "; ".join(f"{what} {first_few(names, _SHOWN)}" for what, names in wrong.items() if names)
    modules = f"tok_embeddings, layers.0 to layers.{run.model.n_layers - 1}, norm and output"
    fix = f"name each of {modules} once, in this order, the last two in one stage"
    if unknown := wrong["the model has no"]:
        fix = f"{did_you_mean(unknown[0], order, 'name what it has')} ({fix})"
    return [run.problem(_PARTS, rule, fix)]
