"""Forecast a run's step, and tell what would fit its GPUs: ``python -m toolkit.planner.fit WORLD_SIZE …``.

A launch starts this beside its ranks, and holds the other end of standard input: when that closes, it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from toolkit.config import Config, load_config
from toolkit.distributed.process_group import DTYPES
from toolkit.errors import ConfigError, ToolkitError
from toolkit.hardware import detect
from toolkit.launcher.forecast import GIB, forecast_file
from toolkit.launcher.supervisor import say
from toolkit.planner.allocations import StepMemory
from toolkit.planner.dry_run import distinct
from toolkit.planner.fake_step import step_memory
from toolkit.planner.layouts import fixed_batch
from toolkit.planner.machines import machine_of
from toolkit.planner.time import step_time
from toolkit.preflight.planned_run import PlannedRun

_MOST_RANKS = 4096


def forecast(run: PlannedRun) -> StepMemory:
    """Find the memory of the rank whose step takes most. The run has passed the preflight."""
    assert run.mesh and run.model
    options: dict[str, Any] = {"param_dtype": DTYPES[run.precision], "target": run.hardware.device}
    found = (step_memory(run.config, run.model, run.mesh, rank, **options) for rank in distinct(run))
    return max(found, key=lambda memory: memory.peak)


def nearest(run: PlannedRun, capacity: int) -> tuple[str, int] | None:
    """Find flags, or a number of ranks, with which a step takes at most ``capacity`` bytes, and how many."""
    for said, other in _alternatives(run):
        if other.mesh is not None and other.batch is not None:
            peak = forecast(other).peak
            if peak <= capacity:
                return said, peak
    return None


def _alternatives(run: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    """Other runs of the same curve, the least change first."""
    config, flags = run.config, ""
    for mode in ("selective", "full"):
        if config.activation_checkpoint.mode not in (mode, "full"):
            option = {"selective_ac_option": "op"} if mode == "selective" else {}
            flags = f"--activation_checkpoint.mode {mode}"
            flags += " --activation_checkpoint.selective_ac_option op" if option else ""
            yield flags, replace(run, config=_changed(config, "activation_checkpoint", mode=mode, **option))
    config = _changed(config, "activation_checkpoint", mode="full")
    if config.training.global_batch_size == -1:  # it would grow with the ranks
        config = fixed_batch(config, run.world_size)
        flags += f" --training.global_batch_size {config.training.global_batch_size}"
    accumulates = run.pp == 1 and not config.optimizer.early_step_in_backward
    if accumulates and config.training.local_batch_size > 1:
        flags += " --training.local_batch_size 1"
        config = _changed(config, "training", local_batch_size=1)
        yield flags.strip(), replace(run, config=config)
    world = 2 * run.world_size
    while world <= _MOST_RANKS:
        yield (
            f"{world} GPUs {f'and {flags.strip()}' if flags else ''}".strip(),
            replace(run, config=config, world_size=world),
        )
        world *= 2


def _changed(config: Config, table: str, **values: Any) -> Config:
    return config.model_copy(update={table: getattr(config, table).model_copy(update=values)})


def seconds(run: PlannedRun) -> float | None:
    """Forecast the time of a step on GPUs of a known kind, of a model whose blocks are alike."""
    assert run.mesh and run.model
    machine = machine_of(run.hardware.name)
    if machine is None:
        return None
    try:
        took = step_time(run.config, run.model, run.mesh, machine, param_dtype=DTYPES[run.precision])
    except ConfigError:
        return None
    return took.seconds


def main(argv: Sequence[str]) -> int:
    """Forecast the run of ``argv``, write it into the run's folder, and say if it fits."""
    world_size, *flags = argv
    config = load_config(flags)
    hardware = detect(config.training.device)
    run = PlannedRun(config, int(world_size), hardware)
    found, took = forecast(run), seconds(run)
    file = forecast_file(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"peak_gib": found.peak / GIB, "step_seconds": took, **asdict(found)}))
    if not hardware.memory:
        return 0
    here = f"{found.peak / GIB:.1f} GiB of {hardware.memory / GIB:.1f} of a GPU here, most in {found.moment}"
    and_seconds = f", and {took:.3g} s" if took else ""
    if found.peak <= hardware.memory:
        say(f"forecast: a step takes {here}{and_seconds}")
        return 0
    say(f"forecast: a step takes {here}: it will not fit")
    if other := nearest(run, hardware.memory):
        say(f"  what fits, with the same curve: {other[0]} ({other[1] / GIB:.1f} GiB)")
    return 0


def _end_with_the_launch() -> None:
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    os.nice(19)
    threading.Thread(target=_end_with_the_launch, daemon=True).start()
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolkitError:  # the launch tells it
        sys.exit(0)
    except Exception as error:  # which must not look like one of the run
        say(f"forecast: none ({type(error).__name__}: {error})")
        sys.exit(0)
