"""Forecast a step on GPUs while the ranks start, and compare the forecast with their measurements."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.launcher.supervisor import say

GIB = 2**30


def forecast_file(config: Config) -> Path:
    """Return the path of a run's forecast."""
    return expand_user(config.job.dump_folder) / "forecast.json"


def metrics_file(config: Config) -> Path:
    """Return the file to which rank 0 appends its measurements."""
    return expand_user(config.job.dump_folder) / "metrics.jsonl"


def measured(config: Config) -> list[str]:
    """Return the lines of :func:`metrics_file`; empty if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return metrics_file(config).read_text(encoding="utf-8").splitlines()
    return []


class Forecast:
    """A low-priority process that computes and reports a forecast.

    The process ends with this one. ``earlier`` is the result of :func:`measured` before the ranks started."""

    def __init__(self, argv: Sequence[str], world_size: int, *, earlier: Sequence[str] = ()):
        self._earlier = frozenset(earlier)
        self._since = time.time()
        self._program: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-m", "toolkit.planner.fit", str(world_size), *argv]
        with suppress(OSError):  # the process or memory limit is reached: a run does not need a forecast
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def end(self, config: Config) -> None:
        """Stop the process if it still runs, and compare the forecast with rank 0's measurements if both
        exist."""
        if self._program:
            self._program.kill()
            self._program.wait()
            _compare(config, self._since, self._earlier)


def _compare(config: Config, since: float, earlier: frozenset[str]) -> None:
    """Compare the forecast with the lines that were written after ``since`` and are not in ``earlier``. Older
    lines belong to another run in the folder, or to an earlier start of this run."""
    file = forecast_file(config)
    try:
        if min(file.stat().st_mtime, metrics_file(config).stat().st_mtime) < since:
            return
        forecast = json.loads(file.read_text())
        lines = [line for line in measured(config) if line not in earlier]
        rows = [row for row in map(json.loads, lines) if "memory_gib" in row]
    except (OSError, ValueError):
        return
    if not rows:
        return
    peak = forecast["peak_gib"]
    most = max(row["memory_gib"] for row in rows)
    say(f"memory: at most {most:.1f} GiB of tensors on rank 0, forecast {peak:.1f}")
    steps = [row["step_seconds"] for row in rows if row.get("step_seconds")]
    if forecast["step_seconds"] and steps:
        say(f"step: {statistics.median(steps):.3g} s in the median, forecast {forecast['step_seconds']:.3g}")
