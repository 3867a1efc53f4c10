"""Forecast a run's step and find settings that fit its GPUs: ``python -m toolkit.planner.fit WORLD_SIZE …``.

A launch starts this process together with its ranks. It exits when the launcher closes its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from toolkit.config import load_config
from toolkit.config.phases import run_phases
from toolkit.distributed.process_group import DTYPES
from toolkit.errors import ConfigError, ToolkitError
from toolkit.hardware import detect
from toolkit.launcher.forecast import GIB, forecast_file
from toolkit.launcher.supervisor import say
from toolkit.planner.allocations import StepMemory
from toolkit.planner.dry_run import distinct_ranks
from toolkit.planner.fake_step import step_memory
from toolkit.planner.layouts import fixed_batch, with_settings
from toolkit.planner.machines import machine_from_device
from toolkit.planner.time import step_time
from toolkit.preflight.planned_run import PlannedRun

_MOST_RANKS = 4096


def forecast(run: PlannedRun) -> StepMemory:
    """Return the memory of a step on the rank with the highest peak. The run must have passed the
    preflight."""
    assert run.mesh and run.model
    options: dict[str, Any] = {"param_dtype": DTYPES[run.precision], "target": run.hardware.device}
    steps = (step_memory(run.config, run.model, run.mesh, rank, **options) for rank in distinct_ranks(run))
    return max(steps, key=lambda memory: memory.peak)


def find_alternative(run: PlannedRun, capacity: int) -> tuple[str, int] | None:
    """Find flags or a number of ranks for which a step fits into ``capacity`` bytes; return them and the
    peak."""
    for change, other in _alternatives(run):
        if other.mesh is not None and other.batch is not None:
            peak = forecast(other).peak
            if peak <= capacity:
                return change, peak
    return None


def _alternatives(run: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    """Yield other runs with the same loss curve, smallest change first."""
    config, flags = run.config, ""
    for mode in ("selective", "full"):
        if config.activation_checkpoint.mode not in (mode, "full"):
            settings = {"activation_checkpoint.mode": mode}
            settings |= {"activation_checkpoint.selective_ac_option": "op"} if mode == "selective" else {}
            flags = f"--activation_checkpoint.mode {mode}"
            flags += " --activation_checkpoint.selective_ac_option op" if mode == "selective" else ""
            yield flags, replace(run, config=with_settings(config, settings))
    config = with_settings(config, {"activation_checkpoint.mode": "full"})
    if config.training.global_batch_size == -1:  # the batch would grow with the number of ranks
        config = fixed_batch(config, run.world_size)
        flags += f" --training.global_batch_size {config.training.global_batch_size}"
    accumulates = run.pp == 1 and not config.optimizer.early_step_in_backward
    if accumulates and config.training.local_batch_size > 1:
        flags += " --training.local_batch_size 1"
        config = with_settings(config, {"training.local_batch_size": 1})
        yield flags.strip(), replace(run, config=config)
    world = 2 * run.world_size
    while world <= _MOST_RANKS:
        yield (
            f"{world} GPUs {f'and {flags.strip()}' if flags else ''}".strip(),
            replace(run, config=config, world_size=world),
        )
        world *= 2


def step_seconds(run: PlannedRun) -> float | None:
    """Forecast the step time on known GPUs, for models with equal blocks; otherwise return None."""
    assert run.mesh and run.model
    machine = machine_from_device(run.hardware.name)
    if machine is None:
        return None
    try:
        return step_time(run.config, run.model, run.mesh, machine, param_dtype=DTYPES[run.precision]).seconds
    except ConfigError:
        return None


def main(argv: Sequence[str]) -> int:
    """Forecast the run of ``argv``, write the result into its folder, and report whether the run fits."""
    world_size, *flags = argv
    config = load_config(flags)
    hardware = detect(config.training.device)
    run = PlannedRun(config, int(world_size), hardware)
    runs = [replace(run, config=phase.config) for phase in run_phases(config)]
    forecasts = [forecast(run) for run in runs]
    worst = max(range(len(runs)), key=lambda n: forecasts[n].peak)
    run, memory, step = runs[worst], forecasts[worst], step_seconds(runs[0])
    file = forecast_file(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"peak_gib": memory.peak / GIB, "step_seconds": step, **asdict(memory)}))
    if not hardware.memory:
        return 0
    peak = (
        f"peak memory {memory.peak / GIB:.1f} of {hardware.memory / GIB:.1f} GiB per GPU, in {memory.moment}"
    )
    if memory.peak <= hardware.memory:
        say(f"forecast: {peak}{f', and {step:.3g} s' if step else ''}")
        return 0
    say(f"forecast: {peak}; it will not fit")
    if other := find_alternative(run, hardware.memory):
        say(f"  this fits, with the same loss curve: {other[0]} ({other[1] / GIB:.1f} GiB)")
    return 0


def _exit_with_launcher() -> None:
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    os.nice(19)
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolkitError:  # the launcher reports it
        sys.exit(0)
    except Exception as error:  # it must not look like an error of the run
        say(f"forecast failed ({type(error).__name__}: {error})")
        sys.exit(0)
