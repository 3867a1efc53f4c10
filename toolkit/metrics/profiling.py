"""Step hook that runs the profiler and memory snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.job import Profiling
from toolkit.config.local_paths import expand_user
from toolkit.metrics.memory_snapshot import MemorySnapshots
from toolkit.metrics.profiler import StepProfiler
from toolkit.step_hooks import StepHook, StepResult


def snapshot_folder(options: Profiling, folder: Path) -> Path | None:
    """Return the folder of memory snapshots of a run in ``folder``, or None if they are disabled."""
    if not options.enable_memory_snapshot:
        return None
    return expand_user(options.save_memory_snapshot_folder, inside=folder)


class ProfilingHook(StepHook):
    """Runs the enabled tools and uses ``exclude`` to exclude their time from the step time."""

    def __init__(
        self,
        options: Profiling,
        folder: Path,
        *,
        first_step: int,
        device: torch.device,
        say: Callable[[str], None],
        exclude: Callable[[str], AbstractContextManager[None]],
    ):
        rank = dist.get_rank()
        self._exclude = exclude
        self._stack = ExitStack()
        self._tools: list[StepProfiler | MemorySnapshots] = []
        if options.enable_profiling:
            traces = expand_user(options.save_traces_folder, inside=folder)
            self._tools.append(
                StepProfiler(options, traces, first_step=first_step, rank=rank, device=device, say=say)
            )
        if snapshots := snapshot_folder(options, folder):
            self._tools.append(MemorySnapshots(snapshots, freq=options.profile_freq, rank=rank))

    def __enter__(self) -> ProfilingHook:
        for tool in self._tools:
            self._stack.enter_context(tool)
        return self

    def after_step(self, step: int, result: StepResult) -> None:
        with self._exclude("profiler"):
            for tool in self._tools:
                tool.after_step(step)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
