"""Rules for tasks of lm-eval during training. Task files are read, but no task is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.config.local_paths import expand_user
from toolkit.errors import Problem, did_you_mean, first_few, install_command
from toolkit.preflight.planned_run import PlannedRun, rule

_KEY = "evaluation.tasks"
_METRIC = "checkpoint.keep_best_metric"


@rule()
def tasks_can_be_scored(run: PlannedRun) -> list[Problem]:
    """Check that lm-eval has the tasks, that these only need likelihoods, and that they have the metric of
    the best checkpoint."""
    options = run.config.evaluation
    if not options.tasks:
        return []
    if run.config.finetune.classes:
        fix = "remove it; validation.enable reports accuracy"
        return [run.problem(_KEY, "a classifier or reward model predicts no tokens, which tasks score", fix)]
    folder = expand_user(options.task_folder) if options.task_folder else None
    if folder and not folder.is_dir():
        fix = "name the folder of the YAML files"
        return [run.problem("evaluation.task_folder", "there is no such folder", fix)]
    if find_spec("lm_eval") is None:
        return [run.problem(_KEY, "the package lm-eval is not installed", install_command("eval"))]
    index = _task_index(options.tasks, folder)
    if unknown := [name for name in options.tasks if name not in index]:
        hint = "`lm-eval ls tasks` lists its tasks; evaluation.task_folder adds those of a folder"
        fix = did_you_mean(unknown[0], index, hint)
        return [run.problem(_KEY, f"there is no task {unknown[0]}", fix)]
    members = {name: task for asked in options.tasks for name, task in _members(index, asked)}
    for name, task in members.items():
        if task.get("output_type") == "generate_until":
            rule = f"{name} generates text, which is not supported during training"
            return [run.problem(_KEY, rule, "remove it, and use `llama-toolkit evaluate` on checkpoints")]
    return _metric(run, members)


def _metric(run: PlannedRun, members: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    checkpoint = run.config.checkpoint
    _, task, metric = [*checkpoint.keep_best_metric.split("/", 2), "", ""][:3]
    if not checkpoint.keep_best or not task:
        return []
    if task not in members:
        fix = f"the tasks are {first_few(list(members), 8)}"
        return [run.problem(_METRIC, f"the task {task} is not in evaluation.tasks", fix)]
    known = [entry["metric"] for entry in members[task].get("metric_list") or []]
    if not known or metric.partition("/")[0] in known:  # lm-eval has defaults
        return []
    return [run.problem(_METRIC, f"{task} has no metric {metric}", f"it has {first_few(known, 8)}")]


def _task_index(names: list[str], folder: Path | None) -> Mapping[str, Any]:
    """Return lm-eval's entries by name: those of ``folder``, if it has all ``names``."""
    from lm_eval.tasks import TaskManager  # an optional extra

    index = TaskManager(include_path=folder, include_defaults=False).task_index
    if set(names) <= set(index):
        return index
    return TaskManager(include_path=folder).task_index  # about ten thousand files


def _members(index: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the settings of a task; of a group or tag, also those of its members."""
    if (entry := index.get(name)) is None:  # a group may define tasks of its own
        return
    settings = entry.cfg or {}
    yield name, settings
    members = settings.get("task") if "group" in settings else [] if entry.cfg else sorted(entry.tags)
    for member in members or []:
        if isinstance(member, dict):
            named = str(member.get("task") or member.get("group"))
            yield named, member
            member = named
        if member != name:
            yield from _members(index, member)
