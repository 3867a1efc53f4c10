"""The forecast beside the ranks on GPUs: what it says, and what would fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from toolkit.config import load_config
from toolkit.hardware import Hardware
from toolkit.launcher.forecast import GIB, Forecast, forecast_file, measured, metrics_file
from toolkit.planner import fit
from toolkit.preflight.planned_run import PlannedRun

MODEL = [
    "--training.device=auto",
    "--model.hf_assets_path=tests/assets/tokenizer",
    "--model.dim=64",
    "--model.n_layers=4",
    "--model.n_heads=4",
    "--model.n_kv_heads=4",
    "--model.ffn_dim=128",
    "--training.seq_len=256",
    "--training.global_batch_size=16",
    "--training.local_batch_size=8",
    "--activation_checkpoint.mode=none",
]


GPU = Hardware("cuda", "H100", 2, native_bf16=True, capability=9.0, memory=80 << 30)
FULL = ["--activation_checkpoint.mode=full"]


@pytest.mark.parametrize(
    ("flags", "less", "says"),
    [
        ([], 0, ["of 80.0 GiB per GPU, in backward of"]),
        (
            [],
            1,
            ["it will not fit\n", "same loss curve: --activation_checkpoint.mode selective --activation_ch"],
        ),
        (FULL, 1, ["it will not fit\n", "same loss curve: --training.local_batch_size 1 ("]),
        ([*FULL, "--training.local_batch_size=1"], 1, ["it will not fit\n", "same loss curve: 4 GPUs ("]),
        (FULL, 1 << 40, ["it will not fit\n"]),
    ],
)
def test_what_is_said(
    flags: list[str],
    less: int,
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*MODEL, *flags, f"--job.dump_folder={tmp_path}"]
    peak = fit.forecast(PlannedRun(load_config(flags), 2, GPU)).peak
    monkeypatch.setattr(fit, "_MOST_RANKS", 8)
    monkeypatch.setattr(fit, "detect", lambda wish: replace(GPU, memory=max(1, peak - less)) if less else GPU)
    assert fit.main(["2", *flags]) == 0
    said = capsys.readouterr().err
    assert all(word in said for word in says) and said.startswith("launch: forecast: peak memory ")
    assert said.count("launch: ") == len(says)
    found = json.loads(forecast_file(load_config(flags)).read_text())
    assert found["peak_gib"] == pytest.approx(sum(found["parts"].values()) / GIB)


@pytest.mark.parametrize("early", [False, True])
def test_what_would_fit_keeps_a_batch_that_the_mesh_gives(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_MOST_RANKS", 8)
    flags = [*MODEL, *FULL, "--training.global_batch_size=-1"]
    flags += ["--optimizer.early_step_in_backward"] if early else []
    others = dict(fit._alternatives(PlannedRun(load_config(flags), 2, GPU)))
    batch, one = "--training.global_batch_size 16", "--training.local_batch_size 1"
    said = [f"4 GPUs and {batch}", f"8 GPUs and {batch}"]
    if not early:  # which accumulates nothing
        said = [f"{batch} {one}", *(f"{it} {one}" for it in said)]
    assert list(others) == said
    for other in others.values():
        assert other.batch and other.batch.total == 16
        assert other.batch.accumulation == 1 or not early


def test_a_known_kind_of_gpu_gives_seconds_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*MODEL, f"--job.dump_folder={tmp_path}"]
    took = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA L4", "of another kind"):
        gpu = replace(GPU, name=name)
        monkeypatch.setattr(fit, "detect", lambda wish, gpu=gpu: gpu)
        assert fit.main(["2", *flags]) == 0
        took[name] = json.loads(forecast_file(load_config(flags)).read_text())["step_seconds"]
        said = f", and {took[name]:.3g} s\n" if took[name] else "GiB per GPU, in"
        assert said in capsys.readouterr().err
    fast, slow, unknown = took.values()
    assert unknown is None and 0 < fast <= slow


def test_frozen_blocks_have_memory_and_no_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = replace(GPU, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(fit, "detect", lambda wish: gpu)
    assert fit.main(["1", *MODEL, "--finetune.trainable=layers.3.*", f"--job.dump_folder={tmp_path}"]) == 0
    assert "GiB per GPU, in" in capsys.readouterr().err


def test_a_launch_ends_where_no_process_can_be_started_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mock.Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
    monkeypatch.setattr(subprocess, "Popen", full)
    forecast = Forecast([], 2)
    config = load_config([*MODEL, f"--job.dump_folder={tmp_path}"])
    forecast.end(config)
    assert full.called


def test_it_ends_with_the_launch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit.planner.fit", "2", *MODEL, f"--job.dump_folder={tmp_path}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
        assert program.stdin
        program.stdin.close()
        assert program.wait(60) == 0
    assert not (tmp_path / "forecast.json").exists()


def test_the_end_compares_it_with_what_was_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config([*MODEL, f"--job.dump_folder={tmp_path}"])
    earlier = ['{"memory_gib": 70.0, "step_seconds": 8}'] * 4  # on fewer GPUs; the run goes on
    metrics_file(config).write_text("\n".join(earlier))
    forecast = Forecast(["--no-such-flag"], 2, earlier=measured(config))  # which the launch itself has told
    forecast_file(config).write_text('{"peak_gib": 61.25, "step_seconds": 1.5}')
    lines = ['{"memory_gib": 60.0, "step_seconds": 9}', '{"memory_gib": 60.5, "step_seconds": 1.25}']
    lines += ['{"event": "save"}', '{"memory_gib": 60.1, "step_seconds": 1.0}']
    metrics_file(config).write_text("\n".join(earlier[:1] + lines))
    forecast.end(config)
    said = capfd.readouterr().err
    assert said.startswith("launch: memory: at most 60.5 GiB of tensors on rank 0, forecast 61.2\n")
    assert said.endswith("launch: step: 1.25 s in the median, forecast 1.5\n")


@pytest.mark.parametrize("name", ["forecast.json", "metrics.jsonl"])
def test_a_file_of_an_earlier_run_is_not_compared(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([*MODEL, f"--job.dump_folder={tmp_path}"])
    monkeypatch.setattr(sys, "executable", "true")  # which writes nothing
    forecast = Forecast([], 2)
    (tmp_path / "forecast.json").write_text('{"peak_gib": 61.25, "step_seconds": 1.5}')
    (tmp_path / "metrics.jsonl").write_text('{"memory_gib": 60.0, "step_seconds": 9}')
    os.utime(tmp_path / name, (1, 1))
    forecast.end(config)
    assert capfd.readouterr().err == ""
