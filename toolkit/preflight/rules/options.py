"""Rules for options that contradict one another or have no effect."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from toolkit.config.schema import Field, fields_by_key
from toolkit.config.types import Needs, OnlyWith, UnknownValue, UnsupportedValues
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
        not run.stages
        or len(run.stages.modules) == run.pp
        or reshard_after_forward(run.config.parallelism) != "never"
    ),
    "stages cut by counts of layers": lambda run: run.config.parallelism.module_fqns_per_model_part is None,
    "optimizer.weight_decay above 0": lambda run: (
        run.config.optimizer.weight_decay > 0
        or any(group.weight_decay for group in run.config.optimizer.groups.values())
    ),
    "several micro-batches per step": lambda run: not run.batch or run.batch.accumulation > 1,
    "a model with experts": lambda run: not run.model or run.model.moe is not None,
    "a model whose experts have a bias": lambda run: (
        not run.model or bool(run.model.moe and run.model.moe.expert_bias)
    ),
    "a base corpus": lambda run: run.config.validation.base_corpus.named,
    "NNODES=MIN:MAX, MIN below MAX": lambda run: len({*node_range(os.environ)}) > 1,
}
"""Conditions that a run may meet, by their names in the schema's ``Needs`` marks."""


@rule()
def supported_options(run: PlannedRun) -> list[Problem]:
    """Reject values from torchtitan that this toolkit does not support."""
    return [
        run.problem(field.key, mark.reason, f"set {field.name} = {format_toml(field.default)}, the default")
        for field in run.config.present_fields()
        for mark in field.marks
        if isinstance(mark, UnsupportedValues) and mark.rejects(run.config.value(field.key))
    ]


def _lacking(run: PlannedRun, field: Field) -> list[OnlyWith]:
    """Return the marks of ``field`` if none of them holds, although one must; marks of its switches come
    first."""
    lacking = []
    for mark in field.marks:
        if not isinstance(mark, OnlyWith):
            continue
        of_switch = _lacking(run, fields_by_key()[mark.switch])
        if not of_switch and mark.is_met(run.config.value(mark.switch)):
            return []
        lacking += [replace(it, rejected=it.rejected and mark.rejected) for it in of_switch] or [mark]
    return lacking


def _needed(run: PlannedRun, field: Field) -> Needs | None:
    """Return the first condition of ``field`` that the run does not meet."""
    needs = (mark for mark in field.marks if isinstance(mark, Needs))
    return next((mark for mark in needs if not _has(run, mark.what)), None)


def _has(run: PlannedRun, what: str) -> bool:
    return FACTS[what](run) if what in FACTS else run.config.value(what) is not None


def _set(run: PlannedRun) -> Iterator[Field]:
    return (field for field in run.config.present_fields() if run.config.value(field.key) != field.default)


def _turned_on(run: PlannedRun, mark: OnlyWith) -> str:
    if isinstance(run.config.value(mark.switch), list):
        return f"add {join_or(map(format_toml, mark.values))} to {mark.switch}"
    return f"set {mark}"


@rule()
def options_act(run: PlannedRun) -> Iterator[Problem]:
    """Check that keys that request something take effect; other unused keys are only noted."""
    for field in _set(run):
        with suppress(UnknownValue):  # the others are still checked
            yield from _idle(run, field)


def _idle(run: PlannedRun, field: Field) -> Iterator[Problem]:
    default = f"{field.name} = {format_toml(field.default)}, the default"
    lacking = _lacking(run, field)
    if mark := next((mark for mark in lacking if mark.rejected), None):
        rule = f"has no effect with {mark.switch} = {format_toml(run.config.value(mark.switch))}"
        yield run.problem(field.key, rule, f"{_turned_on(run, mark)}, or {default}")
    elif not lacking and (need := _needed(run, field)) and need.rejected:
        fix = f"remove it, or set {default}"
        yield run.problem(field.key, f"has no effect without {need.what}", fix)


@note
def options_notes(run: PlannedRun) -> Iterator[str]:
    """Note keys that are set but not used, grouped by the condition that they need."""
    idle = defaultdict(list)
    for field in _set(run):
        if lacking := _lacking(run, field):
            idle[" or ".join(dict.fromkeys(map(str, lacking)))].append(field.key)
        elif need := _needed(run, field):
            idle[need.what].append(field.key)
    for needed, keys in idle.items():
        yield f"{', '.join(keys)} {'have' if len(keys) > 1 else 'has'} no effect without {needed}"


@rule()
def device_available(run: PlannedRun) -> list[Problem]:
    """Check that a run that requests GPUs has them, because it does not fall back to the CPU."""
    if run.config.training.device != "cuda" or run.hardware.device == "cuda":
        return []
    fix = 'make one visible to nvidia-smi (driver, PATH, CUDA_VISIBLE_DEVICES), or set it to "auto" or "cpu"'
    return [run.problem("training.device", "nvidia-smi lists no GPU on this machine", fix)]


@rule()
def validation_has_one_length(run: PlannedRun) -> list[Problem]:
    """Check that only one of validation.steps and validation.samples is set."""
    options = run.config.validation
    if not options.enable or options.samples == -1 or options.steps == -1:
        return []
    rule = "counts batches per rank, while validation.samples counts samples over all ranks"
    return [run.problem("validation.steps", rule, "remove one of the two")]
