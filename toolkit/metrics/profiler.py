"""Write torch.profiler traces at intervals and report how the time of a traced step is spent."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from toolkit.config.job import Profiling
from toolkit.metrics.trace_analysis import split_steps


class StepProfiler:
    """Traces the last ``profiler_active`` steps of every ``profile_freq`` steps, after ``profiler_warmup``
    steps.

    Each rank writes ``<folder>/iteration_<step>/rank<rank>_trace.json`` (for chrome://tracing or
    ui.perfetto.dev); rank 0 also reports how the step time is spent. An incomplete trace at the end of the
    run is dropped. Steps are counted from ``first_step``, and again after a rollback, so that a resumed run
    traces the same steps.
    """

    def __init__(
        self,
        options: Profiling,
        folder: Path,
        *,
        first_step: int,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ):
        self._folder, self._rank, self._device, self._say = folder, rank, device, say
        self._step, self._next = 0, first_step
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints a line for each trace
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        active, warmup = options.profiler_active, options.profiler_warmup
        self._cycle = schedule(wait=options.profile_freq - active - warmup, warmup=warmup, active=active)
        self._profile = self._new_profile(first_step)

    def _new_profile(self, first_step: int) -> profile:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            schedule=lambda steps: self._cycle(steps + first_step - 1),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def __enter__(self) -> StepProfiler:
        self._profile.__enter__()
        return self

    def after_step(self, step: int) -> None:
        if self._device.type == "cuda" and self._profile.current_action.name != "NONE":
            # kernels still running belong to this step, not to the next
            torch.cuda.synchronize(self._device)
        if step == self._next:
            self._step = step
            self._profile.step()
            self._step = 0
        else:  # the run was rolled back and counts this step again
            self._profile.__exit__(None, None, None)
            self._profile = self._new_profile(step + 1)
            self._profile.__enter__()
        self._next = step + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)

    def _write(self, profiled: Any) -> None:
        if not self._step:  # the run is ending
            return
        path = self._folder / f"iteration_{self._step}" / f"rank{self._rank}_trace.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(path))
        except OSError as error:
            self._say(f"the trace of step {self._step} cannot be written: {error}")
            return
        if self._rank == 0:
            self._say(self._report(path))

    def _report(self, path: Path) -> str:
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError):  # torch does not raise when the disk is full
            return f"the trace of step {self._step} was not written; is the disk of {path.parent} full?"
        split = split_steps(events)
        if split is None:
            return f"profiled step {self._step}: the profiler recorded nothing; trace in {path.parent}"
        last = self._step
        which = f"step {last}" if split.steps == 1 else f"steps {last - split.steps + 1} to {last}, per step"
        return f"profiled {which}: {split.wall:.1f} ms\n{split}\n  traces in {path.parent}"
