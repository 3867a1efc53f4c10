"""The forecast beside the ranks on GPUs: what it says, and what would fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config import load_config
from toolkit.hardware import Hardware
from toolkit.launcher.forecast import GIB, begin_forecast, end_forecast, forecast_file
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
        ([], 0, ["of 80.0 GiB of a GPU here, most in backward of"]),
        ([], 1, ["it will not fit\n", "same curve: --activation_checkpoint.mode selective --activation_ch"]),
        (FULL, 1, ["it will not fit\n", "same curve: --training.local_batch_size 1 ("]),
        ([*FULL, "--training.local_batch_size=1"], 1, ["it will not fit\n", "same curve: 4 GPUs ("]),
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
    monkeypatch.setattr(fit, "detect", lambda: replace(GPU, memory=max(1, peak - less)) if less else GPU)
    assert fit.main(["2", *flags]) == 0
    said = capsys.readouterr().err
    assert all(word in said for word in says) and said.startswith("launch: forecast: a step takes ")
    assert said.count("launch: ") == len(says)
    found = json.loads(forecast_file(load_config(flags)).read_text())
    assert found["peak_gib"] == pytest.approx(sum(found["parts"].values()) / GIB)


def test_the_end_compares_it_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([*MODEL, f"--job.dump_folder={tmp_path}"])
    program = begin_forecast(["--no-such-flag"], 2)  # which the launch itself has told
    assert program.wait(60) == 0
    end_forecast(config, program)
    assert capsys.readouterr().err == ""
    forecast_file(config).write_text('{"peak_gib": 61.25}')
    lines = ['{"step": 1, "memory_gib": 60.0}', '{"step": 2, "memory_gib": 60.5}', '{"event": "save"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    end_forecast(config, program)
    assert "memory: at most 60.5 GiB of tensors on rank 0, forecast 61.2" in capsys.readouterr().err
