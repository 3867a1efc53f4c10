"""Weights & Biases, played by a module that remembers what it is sent."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config.job import Metrics
from toolkit.metrics.logger import MetricLogger


class FakeRun:
    def __init__(self, number: int):
        self.id = f"run{number}"
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self.broken = False

    def log(self, values: dict[str, Any], *, step: int) -> None:
        if self.broken:
            raise ConnectionError("no route")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], FakeRun]]:
    """Calls of ``wandb.init``: its options, and the run that it gave."""
    runs: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**options: Any) -> FakeRun:
        runs.append((options, FakeRun(len(runs))))
        return runs[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for name in ("WANDB_PROJECT", "WANDB_TEAM", "WANDB_RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    return runs


def logger(folder: Path, *, all_ranks: bool = False, **about: Any) -> MetricLogger:
    options = Metrics(enable_tensorboard=False, enable_wandb=True, save_for_all_ranks=all_ranks)
    return MetricLogger(options, folder, total_steps=9, **about)


def test_a_run_and_its_resumption_are_one_run(
    tmp_path: Path, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logger(tmp_path, config={"optimizer": {"lr": 0.1}})
    first.log(1, {"loss": 5.0, "mfu": None, "memory_gib": 1.5})
    first.log(1, {"validation_loss": 7.0})
    first.close()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_TEAM", "us")
    monkeypatch.setenv("WANDB_RUN_NAME", "second")
    logger(tmp_path, resume_step=1).close()
    logger(tmp_path).close()
    (begun, run), (resumed, _), (anew, _) = sent
    assert run.logged == [(1, {"train/loss": 5.0, "memory/gib": 1.5}), (1, {"validation/loss": 7.0})]
    assert run.finished
    assert begun["config"] == {"optimizer": {"lr": 0.1}} and begun["dir"] == str(tmp_path)
    assert (begun["project"], begun["entity"], begun["name"]) == ("llama-toolkit", None, None)
    assert (resumed["project"], resumed["entity"], resumed["name"]) == ("mine", "us", "second")
    assert (begun["id"], resumed["id"], resumed["resume"], anew["id"]) == (None, "run0", "allow", None)


def test_a_failure_is_told_once_and_stops_nothing(
    tmp_path: Path, sent: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    log = logger(tmp_path)
    sent[0][1].broken = True
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    log.close()
    assert capsys.readouterr().out.count("Weights & Biases: no route; training continues") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_only_rank_0_sends(tmp_path: Path, sent: list[Any]) -> None:
    logger(tmp_path, rank=1).close()
    assert sent == []


def test_all_ranks_send_to_runs_of_one_group(
    tmp_path: Path, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        log = logger(tmp_path / "mine", rank=rank, all_ranks=True)
        log.log(1, {"loss": 5.0, "memory_gib": 1.0 + rank})
        log.close()
    monkeypatch.setenv("WANDB_RUN_NAME", "long")
    logger(tmp_path / "mine", rank=1, all_ranks=True, resume_step=1).close()
    (first, run), (second, other), (resumed, _) = sent
    assert [it["group"] for it in (first, second, resumed)] == ["mine", "mine", "long"]
    assert [it["name"] for it in (first, second, resumed)] == ["mine-rank-0", "mine-rank-1", "long-rank-1"]
    assert (run.logged[0][1]["memory/gib"], other.logged[0][1]["memory/gib"]) == (1.0, 2.0)
    assert (second["id"], resumed["id"]) == (None, other.id)


@pytest.mark.parametrize("rank", [0, 3])
def test_offline_with_the_package_itself(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = logger(tmp_path, rank=rank, all_ranks=True)
    log.log(1, {"loss": 5.0})
    log.close()
    assert "training continues without" not in capsys.readouterr().out
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
