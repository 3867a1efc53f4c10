"""A checkpoint that an earlier release wrote goes on, with the curve that it had there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = Path(__file__).parents[1] / "assets" / "checkpoint"
LOSSES = {3: 6.160213470458984, 4: 6.064253330230713}
"""As the release that wrote it went on, on another processor perhaps: sums in another order."""


def test_a_checkpoint_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    shutil.copytree(ASSETS, tmp_path / "here")
    command = [sys.executable, "-m", "toolkit.train", "--job.config_file", "run.toml"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, cwd=tmp_path / "here", env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "resumed after step 2, 256 tokens" in ended.stdout
    lines = (tmp_path / "here" / "run" / "metrics.jsonl").read_text().splitlines()
    found = {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}
    assert found == pytest.approx(LOSSES, rel=1e-5)
