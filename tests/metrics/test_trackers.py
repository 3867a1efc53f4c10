"""Weights & Biases, played by a module that remembers what it is sent; the other trackers by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import zipfile
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


# Comet, MLflow and trackio: the packages, which write files where there is no server


def _tracked(folder: Path, name: Any, **about: Any) -> None:
    """Log two values of a run of three steps that is resumed after the second."""
    options = Metrics(enable_tensorboard=False, report_to=[name])
    config = {"training": {"steps": 3}, "model": {"flavor": "x" * 600}}
    for first, resumed in ((1, 0), (3, 2)):
        log = MetricLogger(options, folder, total_steps=3, resume_step=resumed, config=config, **about)
        for step in range(first, first + 2 - resumed // 2):
            log.log(step, {"loss": 5.0 - step, "mfu": None})
        log.close()


def test_mlflow_has_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    _tracked(tmp_path, "mlflow")
    assert "continues without" not in capsys.readouterr().out
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == tmp_path.name
    assert run.data.params["training.steps"] == "3" and len(run.data.params["model.flavor"]) == 500
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(it.step, it.value) for it in history] == [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_trackio_has_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    code = "from pathlib import Path; from tests.metrics.test_trackers import _tracked; "
    code += f"_tracked(Path({str(tmp_path)!r}), 'trackio')"
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "continues without" not in done.stdout, done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "mine.db")) as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    found = [(run, step, json.loads(it)["train/loss"]) for run, step, it in rows]
    assert found == [(tmp_path.name, step, 5.0 - step) for step in (1, 2, 3)]


def test_comet_writes_its_offline_file(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    code = "from pathlib import Path; from tests.metrics.test_trackers import _tracked; "
    code += f"_tracked(Path({str(tmp_path)!r}), 'comet')"
    environment = os.environ | {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "continues without" not in done.stdout, done.stderr
    key = (tmp_path / "comet_experiment_key").read_text()
    files = list((tmp_path / "comet").glob("*.zip"))
    assert files and all(file.name.startswith(key) for file in files)
    said = ""
    for file in files:
        with zipfile.ZipFile(file) as archive:
            said += archive.read("messages.json").decode()
    assert "train/loss" in said and "training.steps" in said
