"""Rules about options that contradict one another, or do nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from toolkit.config.schema import Field, fields_by_key
from toolkit.config.types import ActsWith, Needs, RefusedValues
from toolkit.config.values import format_toml
from toolkit.errors import Problem, join_or
from toolkit.launcher.environment import node_range
from toolkit.parallel.dims import reshard_after_forward
from toolkit.preflight.planned_run import PlannedRun, note, rule

FACTS: dict[str, Callable[[PlannedRun], bool]] = {
    "a GPU": lambda run: run.hardware.device != "cpu",
    "a CPU": lambda run: run.hardware.device == "cpu",
    "a single rank": lambda run: run.world_size == 1,
    "several ranks": lambda run: run.world_size > 1,
    "parameters sharded over several ranks": lambda run: not run.mesh or run.mesh.dp_shard * run.mesh.cp > 1,
    "one stage per rank, or resharding": lambda run: (
        not run.stages or len(run.stages.modules) == run.pp or _reshard(run) != "never"
    ),
    "stages cut by counts of layers": lambda run: run.config.parallelism.module_fqns_per_model_part is None,
    "several micro-batches per step": lambda run: not run.batch or run.batch.accumulation > 1,
    "a base corpus": lambda run: run.config.validation.base_corpus.named,
    "NNODES=MIN:MAX, MIN below MAX": lambda run: len({*node_range(os.environ)}) > 1,
}
"""Needs that a run may meet, by the names in marks of the schema."""


def _reshard(run: PlannedRun) -> bool | int | str:
    return reshard_after_forward(run.config.parallelism)


@rule()
def supported_options(run: PlannedRun) -> list[Problem]:
    """torchtitan's choices that there are not here."""
    return [
        run.problem(field.key, mark.reason, f"set {field.name} = {format_toml(field.default)}, the default")
        for field in run.config.present_fields()
        for mark in field.marks
        if isinstance(mark, RefusedValues) and mark.refuses(run.config.value(field.key))
    ]


def _lacking(run: PlannedRun, field: Field) -> list[ActsWith]:
    """Return the marks of ``field`` of which one would have to hold, those of its switches first."""
    lacking = []
    for mark in field.marks:
        if not isinstance(mark, ActsWith):
            continue
        of_switch = _lacking(run, fields_by_key()[mark.switch])
        if not of_switch and mark.acts(run.config.value(mark.switch)):
            return []
        lacking += [replace(it, refused=it.refused and mark.refused) for it in of_switch] or [mark]
    return lacking


def _needed(run: PlannedRun, field: Field) -> Needs | None:
    """Return the first mark of ``field`` that names what the run has not."""
    needs = (mark for mark in field.marks if isinstance(mark, Needs))
    return next((mark for mark in needs if not _has(run, mark.what)), None)


def _has(run: PlannedRun, what: str) -> bool:
    return FACTS[what](run) if what in FACTS else run.config.value(what) is not None


def _set(run: PlannedRun) -> Iterator[Field]:
    return (field for field in run.config.present_fields() if run.config.value(field.key) != field.default)


def _turned_on(run: PlannedRun, mark: ActsWith) -> str:
    if isinstance(run.config.value(mark.switch), list):
        return f"add {join_or(map(format_toml, mark.values))} to {mark.switch}"
    return f"set {mark}"


@rule()
def options_act(run: PlannedRun) -> list[Problem]:
    """A key that is set and that nothing reads would be ignored in silence."""
    problems = []
    for field in _set(run):
        default = f"{field.name} = {format_toml(field.default)}, the default"
        lacking = _lacking(run, field)
        if mark := next((mark for mark in lacking if mark.refused), None):
            said = f"does nothing with {mark.switch} = {format_toml(run.config.value(mark.switch))}"
            problems.append(run.problem(field.key, said, f"{_turned_on(run, mark)}, or {default}"))
        elif not lacking and (need := _needed(run, field)) and need.refused:
            fix = f"remove it, or set {default}"
            problems.append(run.problem(field.key, f"does nothing without {need.what}", fix))
    return problems


@note
def options_notes(run: PlannedRun) -> list[str]:
    """Name the keys that are set and that nothing reads, by what they would act with."""
    idle = defaultdict(list)
    for field in _set(run):
        if lacking := _lacking(run, field):
            idle[" or ".join(dict.fromkeys(map(str, lacking)))].append(field.key)
        elif need := _needed(run, field):
            idle[need.what].append(field.key)
    return [
        f"{', '.join(keys)} {'do' if len(keys) > 1 else 'does'} nothing without {needed}"
        for needed, keys in idle.items()
    ]


@rule()
def device_is_here(run: PlannedRun) -> list[Problem]:
    """A run that asks for GPUs does not fall back to the CPU."""
    if run.config.training.device != "cuda" or run.hardware.device == "cuda":
        return []
    fix = 'have nvidia-smi show one (driver, PATH, CUDA_VISIBLE_DEVICES), or set it to "auto" or "cpu"'
    return [run.problem("training.device", "there is no GPU here that nvidia-smi shows", fix)]


@rule()
def validation_has_one_length(run: PlannedRun) -> list[Problem]:
    """How much is validated is said once."""
    options = run.config.validation
    if not options.enable or options.samples == -1 or options.steps == -1:
        return []
    rule = "counts the batches of a rank, while validation.samples counts samples of all ranks"
    return [run.problem("validation.steps", rule, "leave one of the two out")]
