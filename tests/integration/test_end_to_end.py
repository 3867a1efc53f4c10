"""Whole programs, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import free_port
from toolkit.checkpoint.manifest import committed_steps
from toolkit.errors import EXIT_FINISHED, EXIT_REQUEUE

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--model.dim=64", "--model.n_layers=2", "--model.n_heads=4", "--training.seq_len=64",
    "--training.global_batch_size=4", "--training.local_batch_size=2",
    "--training.dataset=embedded_validation", "--validation.enable=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def _start(words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output


def _records(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_torchtitans_debug_file_trains(tmp_path: Path, cache: str) -> None:
    file = ROOT / "tests/config/torchtitan/debug_model.toml"
    words = ["-m", "toolkit.train", "--job.config_file", str(file), "--training.seq_len", "64"]
    words += ["--training.steps", "3", "--job.dump_folder", str(tmp_path), "--data.cache_folder", cache]
    code, output = _finish(_start(words))
    assert code == EXIT_FINISHED, output
    losses = [record["loss"] for record in _records(tmp_path)]
    assert len(losses) == 3 and all(8 < loss < 9.5 for loss in losses)  # ln(4096) = 8.3


def test_bare_torchrun_trains(tmp_path: Path, cache: str) -> None:
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--nnodes=1", "--rdzv_id=101"]
    words += ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "-m", "toolkit.train"]
    words += ["--job.config_file", "train_configs/debug_model.toml", *SMALL, "--training.steps=2"]
    code, output = _finish(_start([*words, f"--job.dump_folder={tmp_path}", f"--data.cache_folder={cache}"]))
    assert code == EXIT_FINISHED, output
    assert committed_steps(tmp_path / "checkpoint") == [2]
    assert "finished 2 steps" in output


def test_tasks_of_srun_train_together(tmp_path: Path, cache: str) -> None:
    words = ["-m", "toolkit.train", "--job.config_file", "train_configs/debug_model.toml", *SMALL]
    words += ["--training.steps=2", f"--job.dump_folder={tmp_path}", f"--data.cache_folder={cache}"]
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    step["MASTER_PORT"] = str(free_port())
    tasks = [_start(words, **step, SLURM_PROCID=str(task), SLURM_LOCALID=str(task)) for task in (0, 1)]
    (code, output), (other, said) = (_finish(task) for task in tasks)
    assert (code, other) == (EXIT_FINISHED, EXIT_FINISHED), output + said
    assert "the 2 tasks of srun are the ranks of one run" in output and "finished 2 steps" in output
    assert "finished" not in said and [it["step"] for it in _records(tmp_path) if "loss" in it][-1] == 2


def test_a_launch_that_is_stopped_goes_on_where_it_was(tmp_path: Path, cache: str) -> None:
    words = ["-m", "toolkit.launch", "--job.config_file", "train_configs/debug_model.toml", *SMALL]
    words += [f"--job.dump_folder={tmp_path}", f"--data.cache_folder={cache}", "--metrics.log_freq=1"]
    process = _start([*words, "--training.steps=100000"], NGPU="2")
    deadline = time.monotonic() + 60
    while not _records(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = _finish(process)
    assert code == EXIT_REQUEUE, output
    (stopped_at,) = committed_steps(tmp_path / "checkpoint")

    steps = stopped_at + 3
    code, output = _finish(_start([*words, f"--training.steps={steps}"], NGPU="2"))
    assert code == EXIT_FINISHED, output
    assert f"resumed after step {stopped_at}" in output
    records = _records(tmp_path)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    curve = events.Scalars("train/loss")
    assert [point.step for point in curve] == list(range(1, steps + 1))
    assert [point.value for point in curve] == pytest.approx([record["loss"] for record in records])
