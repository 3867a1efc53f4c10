"""Rules about the stages of a pipeline: how many there are, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
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
    names = module_names(run.model.n_layers)
    places: dict[str, list[int]] = {}
    for stage, part in enumerate(parts):
        for name in part:
            places.setdefault(name, []).append(stage)
    found = [*_unknown(places, names), *_empty_or_double(parts, places)]
    found = found or _missing(places, names) or _out_of_order(places, names)
    return [run.problem(_PARTS, said, fix) for said, fix in found]


_Found = list[tuple[str, str]]


def _unknown(places: Iterable[str], names: list[str]) -> _Found:
    unknown = [name for name in places if name not in names]
    if not unknown:
        return []
    modules = f"its modules are tok_embeddings, layers.0 to {names[-3]}, norm and output"
    fix = f"{did_you_mean(unknown[0], names, 'name those that it has')} ({modules})"
    return [(f"the model has no {first_few(unknown, _SHOWN)}", fix)]


def _empty_or_double(parts: list[list[str]], places: dict[str, list[int]]) -> _Found:
    found = [
        (f"stage {stage} holds nothing", "give it modules of its neighbours, or remove it")
        for stage, part in enumerate(parts)
        if not part
    ]
    for name, stages in places.items():
        if len(stages) > 1:
            where = f"twice in stage {stages[0]}" if stages[0] == stages[1] else f"in stages {either(stages)}"
            found.append((f"{name} is {where.replace(' or ', ' and ')}", "leave it in one of them"))
    return found


def _missing(places: dict[str, list[int]], names: list[str]) -> _Found:
    missing = [name for name in names if name not in places]
    if not missing:
        return []
    after = next((name for name in reversed(names[: names.index(missing[0])]) if name in places), None)
    stage = places[after][0] if after else 0
    return [(f"no stage holds {first_few(missing, _SHOWN)}", f"add {missing[0]} to stage {stage}")]


def _out_of_order(places: dict[str, list[int]], names: list[str]) -> _Found:
    if places["norm"] != places["output"]:
        norm, output = places["norm"][0], places["output"][0]
        rule = f"norm is in stage {norm} and output in stage {output}: they are computed as one"
        return [(rule, f"put norm into stage {output}, too")]
    for before, name in pairwise(names):
        if places[name] < places[before]:
            rule = f"{name} is in stage {places[name][0]}, before {before} in stage {places[before][0]}"
            return [(rule, "keep the order of the forward: tok_embeddings, layers.0, …, norm, output")]
    return []
