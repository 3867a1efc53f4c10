"""Tasks of lm-eval that cannot be scored during training are rejected before the launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU, configure
from toolkit.preflight import check
from toolkit.preflight.rules import evaluation

TASK = "task: choices\noutput_type: multiple_choice\nmetric_list: [{metric: acc}]\ntag: mine\n"
OTHER = "task: texts\noutput_type: generate_until\n"
GROUP = "group: both\ntask: [choices, {task: more, output_type: generate_until}]\n"


def _said(*flags: str) -> str:
    config = configure(["--evaluation.task_folder=tasks", *(f"--{flag}" for flag in flags)])
    return "\n".join(str(problem) for problem in check(config, world_size=1, hardware=CPU))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in {"choices": TASK, "texts": OTHER, "both": GROUP}.items():
        (tasks / f"{name}.yaml").write_text(text)


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    said = _said("evaluation.tasks=choices")
    assert "evaluation.tasks = ['choices']" in said and "pip install" in said and "[eval]" in said


@pytest.mark.parametrize("flag", ["finetune.classification.num_labels=2", "finetune.objective=reward"])
def test_a_model_without_a_vocabulary_has_no_tasks(flag: str) -> None:
    said = _said("evaluation.tasks=choices", flag)
    assert "evaluation.tasks = ['choices']" in said and "predicts no tokens" in said


def test_tasks_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra eval is not installed")
    only_mine = tasks.TaskManager(include_path="tasks", include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: only_mine)
    for good in ("choices", "mine"):
        assert not _said(f"evaluation.tasks={good}")
    assert "there is no task choice" in (said := _said("evaluation.tasks=choice"))
    assert "did you mean choices?" in said
    assert "texts generates text" in _said("evaluation.tasks=choices,texts")
    assert "more generates text" in _said("evaluation.tasks=both")


def test_the_best_checkpoint_has_a_metric_of_a_task() -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")

    def said(metric: str, tasks: str = "mine") -> str:
        saving = ("checkpoint.enable", "checkpoint.keep_best", "checkpoint.interval=1000")
        return _said(f"evaluation.tasks={tasks}", *saving, f"checkpoint.keep_best_metric={metric}")

    assert not said("eval/choices/acc")
    told = said("eval/choices/f1")
    assert "checkpoint.keep_best_metric = 'eval/choices/f1'" in told and "it has acc" in told
    told = said("eval/words/acc")
    assert "the task words is not in evaluation.tasks" in told and "the tasks are mine, choices" in told
