"""A run on a GPU, beside the same run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def _losses(folder: Path, cache: Path, precision: str, **environment: str) -> list[float]:
    command = [sys.executable, "-m", "toolkit.train", "--job.config_file=train_configs/debug_model.toml"]
    command += ["--training.steps=20", "--metrics.log_freq=1", "--training.dataset=embedded_validation"]
    command += ["--validation.enable=false", f"--training.mixed_precision_param={precision}"]
    command += [f"--job.dump_folder={folder}", f"--data.cache_folder={cache}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=170)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "relative"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_cuda_gives_the_curve_of_the_cpu(tmp_path: Path, precision: str, relative: float) -> None:
    # fp32: other kernels round otherwise, and 20 updates multiply 1e-6 by some tens. bf16 against fp32: its
    # 8 bits are 4e-3 a value, which the mean over 4,096 tokens averages and 20 updates multiply.
    cpu = _losses(tmp_path / "cpu", tmp_path / "cache", "float32", CUDA_VISIBLE_DEVICES="")
    gpu = _losses(tmp_path / "gpu", tmp_path / "cache", precision)
    assert gpu == pytest.approx(cpu, rel=relative)
