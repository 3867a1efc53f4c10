"""The profiler and memory snapshots of a run, loaded where they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.config.job import Profiling
from toolkit.config.local_paths import expand_user


def snapshot_folder(options: Profiling, folder: Path) -> Path | None:
    """Where the memory snapshots of a run in ``folder`` are; None where it writes none."""
    if not options.enable_memory_snapshot:
        return None
    return expand_user(options.save_memory_snapshot_folder, inside=folder)


@contextmanager
def profiling(
    options: Profiling, folder: Path, *, first_step: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[int], None]]:
    """Start what ``options`` ask for; gives the function that is to be told of each finished step."""
    rank = dist.get_rank()
    told: list[Callable[[int], None]] = []
    with ExitStack() as stack:
        if options.enable_profiling:
            from toolkit.metrics.profiler import StepProfiler

            profiler = StepProfiler(
                options,
                expand_user(options.save_traces_folder, inside=folder),
                first_step=first_step,
                rank=rank,
                device=device,
                say=say,
            )
            told.append(stack.enter_context(profiler).after_step)
        if snapshots_in := snapshot_folder(options, folder):
            from toolkit.metrics.memory_snapshot import MemorySnapshots

            snapshots = MemorySnapshots(snapshots_in, freq=options.profile_freq, rank=rank)
            told.append(stack.enter_context(snapshots).after_step)

        def after_step(step: int) -> None:
            for tell in told:
                tell(step)

        yield after_step
