"""Tell if a run's step will fit its GPUs, and what would: ``python -m toolkit.planner.fit WORLD_SIZE …``.

A launch starts this beside its ranks, which take longer until their first step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from toolkit.config import Config, load_config
from toolkit.distributed.process_group import DTYPES
from toolkit.errors import ToolkitError
from toolkit.hardware import detect
from toolkit.launcher.forecast import GIB, forecast_file
from toolkit.launcher.supervisor import say
from toolkit.planner.allocations import StepMemory
from toolkit.planner.dry_run import distinct
from toolkit.planner.fake_step import step_memory
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
    if config.training.global_batch_size > 0 and config.training.local_batch_size > 1 and run.pp == 1:
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


def main(argv: Sequence[str]) -> int:
    """Forecast the run of ``argv``, write it into the run's folder, and say if it fits."""
    world_size, *flags = argv
    hardware = detect()
    run = PlannedRun(load_config(flags), int(world_size), hardware)
    found = forecast(run)
    file = forecast_file(run.config)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"peak_gib": found.peak / GIB, **asdict(found)}))
    here = f"of {hardware.memory / GIB:.1f} GiB of a GPU here, most in {found.moment}"
    if found.peak <= hardware.memory:
        say(f"forecast: a step takes {found.peak / GIB:.1f} GiB {here}")
        return 0
    say(f"forecast: a step takes {found.peak / GIB:.1f} GiB {here}: it will not fit")
    if other := nearest(run, hardware.memory):
        say(f"  what fits, with the same curve: {other[0]} ({other[1] / GIB:.1f} GiB)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ToolkitError:  # the launch tells it
        sys.exit(0)
