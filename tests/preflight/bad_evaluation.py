"""Runs that break the rules of ``rules.evaluation``, and those of the best checkpoint."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad, bad

_SAVED = "checkpoint.keep_best checkpoint.enable"

CASES: list[Bad] = [
    bad(
        "tasks_can_be_scored",
        "evaluation.task_folder=none evaluation.tasks=arc_easy",
        "there is no such folder",
    ),
    bad(
        "options_act",
        "checkpoint.keep_best_metric=eval/a/acc checkpoint.enable",
        "with checkpoint.keep_best = false",
    ),
    bad(
        "checkpoints_can_be_saved",
        f"checkpoint.keep_best_metric=acc {_SAVED}",
        "is not a metric",
        "eval/TASK",
    ),
    bad(
        "checkpoints_can_be_saved",
        f"checkpoint.keep_best_metric=eval/a/acc {_SAVED}",
        "is a score on a task, and there is none",
        "set evaluation.tasks",
    ),
    bad(
        "checkpoints_can_be_saved",
        f"{_SAVED} checkpoint.keep_best_metric=eval/a/acc checkpoint.interval=4 evaluation.freq=6 "
        "evaluation.tasks=a evaluation.task_folder=none",
        "evaluates every 6",
        "evaluation.freq to a multiple of 4",
        also="tasks_can_be_scored",
    ),
]
