"""The profiler and memory snapshots of a run, loaded where they are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.config.job import Profiling as ProfilingOptions
from toolkit.config.local_paths import expand_user
from toolkit.metrics.memory_snapshot import MemorySnapshots
from toolkit.metrics.profiler import StepProfiler
from toolkit.step_hooks import StepHook, StepResult


def snapshot_folder(options: ProfilingOptions, folder: Path) -> Path | None:
    """Where the memory snapshots of a run in ``folder`` are; None where it writes none."""
    if not options.enable_memory_snapshot:
        return None
    return expand_user(options.save_memory_snapshot_folder, inside=folder)


class Profiling(StepHook):
    """Runs what ``options`` ask for, ``apart`` from the steps."""

    def __init__(
        self,
        options: ProfilingOptions,
        folder: Path,
        *,
        first_step: int,
        device: torch.device,
        say: Callable[[str], None],
        apart: Callable[[str], AbstractContextManager[None]],
    ):
        rank = dist.get_rank()
        self._apart = apart
        self._stack = ExitStack()
        self._tools: list[StepProfiler | MemorySnapshots] = []
        if options.enable_profiling:
            traces = expand_user(options.save_traces_folder, inside=folder)
            self._tools.append(
                StepProfiler(options, traces, first_step=first_step, rank=rank, device=device, say=say)
            )
        if snapshots_in := snapshot_folder(options, folder):
            self._tools.append(MemorySnapshots(snapshots_in, freq=options.profile_freq, rank=rank))

    def __enter__(self) -> Profiling:
        for tool in self._tools:
            self._stack.enter_context(tool)
        return self

    def after_step(self, step: int, result: StepResult) -> None:
        with self._apart("profiler"):
            for tool in self._tools:
                tool.after_step(step)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
