"""tools/slurm/train.sbatch under a real Slurm of two nodes (tests/launcher/slurm.py says what it needs).

tests/run.sh -m exhaustive tests/launcher/test_slurm.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.slurm import Slurm, missing, slurm
from toolkit.checkpoint.manifest import committed_steps

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
    pytest.mark.timeout(1500),
]

ROOT = Path(__file__).parents[2]
SCRIPT = "tools/slurm/train.sbatch"
FLAGS = [
    "--model.dim=64", "--model.n_layers=2", "--model.ffn_dim=160", "--training.seq_len=256",
    "--training.dataset=embedded_validation", "--lr_scheduler.warmup_steps=2", "--lr_scheduler.decay_ratio=0",
    "--validation.enable=false", "--metrics.log_freq=1", "--metrics.enable_tensorboard=false",
    "--checkpoint.keep_latest_k=3", "--training.global_batch_size=8",
]  # fmt: skip
VARIABLES = {"NGPU": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def output(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.glob("slurm-*.out")))


def lines(folder: Path) -> list[dict[str, float]]:
    """A run's training steps, in the order of its metrics.jsonl."""
    file = folder / "metrics.jsonl"
    shown = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in shown if "loss" in line]


def submit(cluster: Slurm, folder: Path, *arguments: str, run: tuple[str, ...], **variables: str) -> int:
    folder.mkdir(exist_ok=True)
    script = [f"--output={folder}/slurm-%j.out", *arguments, SCRIPT]
    return cluster.submit(*script, *FLAGS, f"--job.dump_folder={folder}", *run, **VARIABLES | variables)


def test_time_limits_are_survived_and_scancel_saves(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("--training.steps=100000",)
    job = submit(cluster, run, "--time=2", "--signal=USR1@60", run=endless)
    cluster.wait(lambda: cluster.restarts(job) == 2, 900)
    before = len(lines(run))
    assert before > 0
    cluster.wait(lambda: len(lines(run)) > before + 5, 600)
    cluster.run("scancel", str(job))
    cluster.wait(lambda: cluster.state(job) == "CANCELLED", 120)
    cluster.wait(lambda: cluster.run("squeue", "-h").strip() == "", 60)

    shown = output(run)
    print(shown)
    steps = [line["step"] for line in lines(run)]
    assert steps == list(range(1, len(steps) + 1))  # nothing lost, nothing twice
    assert shown.count("resumed after step") == 2
    saved = committed_steps(run / "checkpoint")
    assert saved[-1] == steps[-1]

    alone = tmp_path / "alone"
    flags = [
        *FLAGS,
        f"--job.dump_folder={alone}",
        f"--training.steps={len(steps)}",
        "--checkpoint.enable=false",
    ]
    command = [
        sys.executable,
        "-m",
        "toolkit.train",
        "--job.config_file=train_configs/debug_model.toml",
        *flags,
    ]
    subprocess.run(command, cwd=ROOT, env=os.environ | VARIABLES, check=True, timeout=900)
    for ours, expected in zip(lines(run), lines(alone), strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_dead_node_ends_the_job_and_its_return_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, run=("--training.steps=300", "--checkpoint.interval=20"))
    cluster.wait(lambda: len(committed_steps(tmp_path / "checkpoint")) > 0, 120)
    cluster.kill_node("node1")
    cluster.wait(lambda: cluster.state(job) in ("PENDING", "FAILED"), 120)
    assert cluster.state(job) == "PENDING", output(tmp_path)
    cluster.start_node("node1")
    cluster.wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 400)
    print(output(tmp_path))
    assert [line["step"] for line in lines(tmp_path)][-1] == 300
    assert "resumed after step" in output(tmp_path)


def test_an_array_trains_each_seed_in_a_folder_of_its_own(cluster: Slurm, tmp_path: Path) -> None:
    each = (f"--job.dump_folder={tmp_path}/seed-%a", "--debug.seed=%a", "--training.steps=3")
    job = submit(cluster, tmp_path, "--array=1-2", "--nodes=1", run=each)
    cluster.wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 180)
    assert cluster.state(job) == "COMPLETED", output(tmp_path)
    first, second = (lines(tmp_path / f"seed-{seed}")[0]["loss"] for seed in (1, 2))
    assert first != second


def test_variables_of_the_user_are_kept_or_refused(cluster: Slurm, tmp_path: Path) -> None:
    run = ("--training.steps=2",)
    job = submit(cluster, tmp_path, run=run, MASTER_ADDR="10.77.0.1", MASTER_PORT="31234", NGPU="2")
    cluster.wait(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 180)
    assert cluster.state(job) == "COMPLETED", output(tmp_path)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])  # it trained
    refused = tmp_path / "refused"
    job = submit(cluster, refused, run=run, NNODES="3")
    cluster.wait(lambda: cluster.state(job) == "FAILED", 60)
    assert "NNODES is 3" in output(refused) and "--nodes" in output(refused)
