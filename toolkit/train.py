"""A training process: ``python -m toolkit.train --job.config_file FILE [--table.key value …]``.

One process by itself, or one of many under ``run_train.sh``, torchrun or srun. The configuration is checked
before torch is imported, so that a mistake costs a fraction of a second. Exit codes: `toolkit.errors`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until something listens, Ctrl-C simply ends the process: a traceback out of an import would say nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import os
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from toolkit.config import Config, asks_for_tracebacks, load_config
from toolkit.config.job import Health
from toolkit.data.run_data import TOKENS, RunData, from_text
from toolkit.errors import (
    EXIT_ERROR,
    EXIT_FINISHED,
    EXIT_REQUEUE,
    DataError,
    DeviceError,
    OutOfMemory,
    ToolkitError,
    report,
)
from toolkit.io import standard_streams
from toolkit.launcher.environment import (
    CHECKED_DEVICE,
    SUPERVISED,
    is_reporting_rank,
    rank_environment,
    slurm_rank,
    tells_for_all,
)

if TYPE_CHECKING:
    from toolkit.launcher.fault_reporter import FaultReporter


def _train(config: Config, faults: FaultReporter | None, checked_device: str) -> int:
    import torch

    from toolkit.distributed import process_group
    from toolkit.metrics.startup_timer import Phases
    from toolkit.trainer import Trainer

    chief = rank_environment(os.environ).rank == 0
    phases = Phases(enabled=chief)
    with phases("tokenizer and tokens"):
        data = _data(config, progress=chief)
    device = process_group.local_device(checked_device)
    if faults:
        timed = config.health.straggler_factor is not None
        faults.record_collectives(config.comm.trace_buf_size, timed=timed)
    with phases("process group"):
        process_group.start(device, timeout_seconds=config.comm.init_timeout_seconds)
    try:
        trainer = Trainer(config, data, device, phases)
    except torch.OutOfMemoryError as error:
        from toolkit.metrics.out_of_memory import out_of_memory_advice

        raise OutOfMemory(out_of_memory_advice(device, 0, error)) from error
    if config.health != Health():
        from toolkit.health.watch import health_hooks

        trainer.hooks += health_hooks(trainer)
    if faults:
        faults.step = lambda: trainer.train_state.step
    try:
        code = trainer.train()
    except RuntimeError as error:
        from toolkit.data.dataloader import lost_worker

        if lost := lost_worker(error):
            raise lost from error
        raise
    # Only here: after an error, leaving the group would wait for peers that wait for us.
    process_group.stop()
    return code


def _data(config: Config, *, progress: bool) -> RunData:
    """The data that the launcher has prepared; without one each rank looks for itself."""
    if SUPERVISED in os.environ and (told := os.environ.get(TOKENS)):
        return from_text(told)
    from toolkit.data.build import open_data

    return open_data(config, progress=progress)


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Have torch's CUDA allocator extend its segments, which wastes less memory on sizes that vary.

    What the environment configures stays. Call before torch is imported.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def main(argv: Sequence[str]) -> int:
    """Run the training that ``argv`` describes and return the exit code."""
    rank, faults = 0, None
    checked = os.environ.get(CHECKED_DEVICE, "")
    try:
        os.environ |= (slurm := slurm_rank(os.environ))
        config = load_config(argv)
        debug = config.job.debug
        if config.is_dry:
            from toolkit.planner.dry_run import dry_run

            return dry_run(config, os.environ, argv)
        here = rank_environment(os.environ)
        rank, world_size = here.rank, here.world_size
        if slurm and rank == 0:
            print(
                f"the {world_size} tasks of srun are the ranks of one run; WORLD_SIZE=1 trains in each alone"
            )
        if config.training.device == "cpu":  # before torch looks for them
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        let_segments_grow(os.environ)
        if SUPERVISED not in os.environ:  # else the launch has
            from toolkit import preflight
            from toolkit.hardware import detect

            hardware = detect(config.training.device)
            preflight.check_and_tell(config, world_size=world_size, hardware=hardware, tell=rank == 0)
            checked = hardware.device
    except ToolkitError as error:  # the same on every rank
        return report(error, show=is_reporting_rank(os.environ), debug=asks_for_tracebacks(argv))
    if world_size > 1:
        from toolkit.launcher.fault_reporter import FaultReporter
        from toolkit.launcher.fault_reports import traces_prefix

        prefix = traces_prefix(config.job, config.comm)
        faults = FaultReporter(prefix, rank, world_size, supervised=SUPERVISED in os.environ)
    try:
        return _train(config, faults, checked)
    except ToolkitError as error:
        # A rank may be alone in failing to read or to find device or memory; the others are agreed upon.
        alone = isinstance(error, DataError | DeviceError | OutOfMemory)
        return report(error, show=alone or tells_for_all(os.environ, here), debug=debug)
    except Exception as error:
        if not faults or not faults.lost_peers(error):
            return report(error, show=True)
        if debug:
            traceback.print_exception(error)
        print(faults.failed(error), file=sys.stderr)
        return EXIT_ERROR


def _leave(code: int) -> NoReturn:
    """End with ``code``; after a failure at once, since the interpreter waits for collectives that hang."""
    if code in (EXIT_FINISHED, EXIT_REQUEUE):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    standard_streams.protect()
    # Imports make no garbage, and take longer while it is looked for; training does that at steps of its own.
    gc.disable()
    _leave(main(sys.argv[1:]))
