"""The forecast of a run's memory on GPUs, made beside its ranks, and compared with what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.launcher.supervisor import say

GIB = 2**30


def forecast_file(config: Config) -> Path:
    """Where a run's forecast lies."""
    return expand_user(config.job.dump_folder) / "forecast.json"


def begin_forecast(argv: Sequence[str], world_size: int) -> subprocess.Popen[bytes]:
    """Start the program that makes it, and says what it finds, with few claims on the processor."""
    command = [sys.executable, "-m", "toolkit.planner.fit", str(world_size), *argv]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


def end_forecast(config: Config, program: subprocess.Popen[bytes]) -> None:
    """Compare the forecast with the most that rank 0's tensors took, where both are known."""
    if program.poll() is None:
        program.kill()
    program.wait()
    try:
        forecast = json.loads(forecast_file(config).read_text())["peak_gib"]
        lines = (expand_user(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
        measured = max(json.loads(line).get("memory_gib", 0.0) for line in lines)
    except (OSError, ValueError, KeyError):
        return
    say(f"memory: at most {measured:.1f} GiB of tensors on rank 0, forecast {forecast:.1f}")
