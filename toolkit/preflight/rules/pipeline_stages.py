"""Rules about the stages of a pipeline: how many there are, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product
from typing import Any

from toolkit.errors import Problem, did_you_mean, either, first_few
from toolkit.parallel.dims import degrees
from toolkit.parallel.pipeline_schedules import (
    SCHEDULES,
    Schedule,
    is_cut,
    module_names,
    pipeline_stages,
    schedule_of,
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
    others = [other for other, schedule in SCHEDULES.items() if schedule.takes_stages(count, run.pp)]
    fixes = []
    if by_hand:
        fixes.append(f"name {_needs(run.schedule, run.pp)}")
    elif fitting := _sizes(run, count):
        fixes.append(f"set it to {either(fitting)}")
    elif (ends := _ends(run, pipeline_parallel_layers_per_stage=None)) is not None:
        fixes.append(_and("remove it", ends))
    if others and (by_hand or _works(run, pipeline_parallel_schedule=others[0])):
        fixes.append(f"set {_SCHEDULE} to {either(others)}")
    rule = f"{said}, but {name} on {run.pp} ranks takes {_needs(run.schedule, run.pp)}"
    return [run.problem(_PARTS if by_hand else _PER_STAGE, rule, ", or ".join(fixes) or f"lower {_DEGREE}")]


def _needs(schedule: Schedule, pp: int) -> str:
    if schedule.more:
        return f"{schedule.stages * pp} or a larger multiple of {pp}"
    return f"{schedule.stages * pp}, {'two' if schedule.stages == 2 else 'one'} a rank"


def _sizes(run: PlannedRun, count: int) -> list[int]:
    """Layers a stage that the schedule takes, those first that give about ``count`` stages."""
    assert run.model is not None
    by_count = {}
    for size in range(run.model.n_layers, 0, -1):
        change = {"pipeline_parallel_layers_per_stage": size}
        if _works(run, **change):
            by_count[len(_cut(run, **change))] = size
    return [by_count[other] for other in sorted(by_count, key=lambda other: abs(other - count))][:_SHOWN]


def _cut(run: PlannedRun, **change: Any) -> list[list[str]]:
    """The modules of each stage with other options of ``[parallelism]``."""
    assert run.model is not None
    options = run.config.parallelism.model_copy(update=change)
    return pipeline_stages(options, run.model.n_layers).modules


def _works(run: PlannedRun, **change: Any) -> bool:
    """Check that the schedule takes the stages and each has something."""
    assert run.model is not None
    options = run.config.parallelism.model_copy(update=change)
    modules, pp = _cut(run, **change), options.pipeline_parallel_degree
    return schedule_of(options).takes_stages(len(modules), pp) and is_cut(modules, run.model.n_layers)


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
    return [run.problem(key, rule, ", or ".join(_fill_stages(run)) or "set it to 1")]


def _fill_stages(run: PlannedRun) -> list[str]:
    """Ways to leave no stage empty: ends that count less, other sizes, fewer ranks or stages."""
    fixes = []
    if ends := _ends(run):
        fixes.append(f"set {ends}")
    if run.config.parallelism.pipeline_parallel_layers_per_stage is not None:
        sizes = _sizes(run, len(_cut(run)))
        fixes += [f"set it to {either(sizes)}"] if sizes else []
    else:
        fewer = [pp for pp in range(run.pp - 1, 1, -1) if _has_mesh(run, pp)]
        asked = {pp: _ends(run, pipeline_parallel_degree=pp) for pp in fewer}
        fixes += [_and(f"set it to {pp}", ends) for pp, ends in asked.items() if ends is not None][:1]
    single = {"pipeline_parallel_schedule": "1F1B", "pipeline_parallel_layers_per_stage": None}
    if run.schedule.stages > 1 and (ends := _ends(run, **single)) is not None:
        fixes.append(_and(f'set {_SCHEDULE} = "1F1B"', ends))
    return fixes


def _has_mesh(run: PlannedRun, pp: int) -> bool:
    options = run.config.parallelism.model_copy(update={"pipeline_parallel_degree": pp})
    return degrees(options, run.world_size) is not None


def _ends(run: PlannedRun, **change: Any) -> str | None:
    """The least change of what embedding and head count as with which it works: "" is no change."""
    asked = [getattr(run.config.parallelism, name) for name in _ENDS]
    choices = product(*(range(value + 1) for value in asked))
    for values in sorted(choices, key=sum, reverse=True):
        ends = dict(zip(_ENDS, values, strict=True))
        if _works(run, **change, **ends):
            new = [name for name, old in zip(_ENDS, asked, strict=True) if ends[name] != old]
            return " and ".join(f"{name} = {ends[name]}" for name in new)
    return None


def _and(fix: str, ends: str) -> str:
    return f"{fix}, with {ends}" if ends else fix


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
