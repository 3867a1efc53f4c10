"""The training process, ``python -m toolkit.train --job.config_file FILE [--table.key value …]``.

It runs alone, or as one rank under ``run_train.sh``, torchrun or srun. The configuration is checked before
torch is imported, so that a mistake is reported within a fraction of a second. Exit codes are in
`toolkit.errors`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Ctrl-C during imports ends the process without a traceback; the trainer installs its own handler later.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import gc
import os
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.config import Config, asks_for_tracebacks, load_config
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
    is_rank_0 = rank_environment(os.environ).rank == 0
    if is_rank_0:
        print("  importing PyTorch …", flush=True)
    import torch

    from toolkit.distributed import process_group
    from toolkit.health.watch import health_hooks
    from toolkit.metrics.startup_timer import StartupTimer
    from toolkit.run_phases import train_in_phases
    from toolkit.trainer import Trainer

    timer = StartupTimer(enabled=is_rank_0)
    with timer("tokenizer and tokens"):
        data = _data(config, progress=is_rank_0)
    device = process_group.local_device(checked_device)
    if faults:
        timed = config.health.straggler_factor is not None
        faults.record_collectives(config.comm.trace_buf_size, timed=timed)
    with timer("process group"):
        process_group.start(device, timeout_seconds=config.comm.init_timeout_seconds)

    def build(**options: Any) -> Trainer:
        try:
            trainer = Trainer(config, data, device, timer, **options)
        except torch.OutOfMemoryError as error:
            from toolkit.metrics.out_of_memory import out_of_memory_advice

            raise OutOfMemory(out_of_memory_advice(device, 0, error)) from error
        trainer.hooks += health_hooks(trainer)
        if faults:
            state = trainer.train_state  # the trainer itself has to be freed after its phase
            faults.step = lambda: state.step
        return trainer

    try:
        code, _ = train_in_phases(config, build)
    except RuntimeError as error:
        from toolkit.data.dataloader import lost_worker

        if lost := lost_worker(error):
            raise lost from error
        raise
    # Only after success: after an error, destroying the group would wait for peers that wait for this rank.
    process_group.stop()
    return code


def _data(config: Config, *, progress: bool) -> RunData:
    """Return the data prepared by the launcher; without a launcher each rank opens it."""
    if SUPERVISED in os.environ and (prepared := os.environ.get(TOKENS)):
        return from_text(prepared)
    from toolkit.data.build import open_data

    return open_data(config, progress=progress)


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Enable expandable segments in torch's CUDA allocator to reduce fragmentation.

    Settings in the environment take precedence. Call before torch is imported.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _load(argv: Sequence[str]) -> Config:
    """Load the config. If some settings are invalid, the other settings are checked too."""
    from toolkit import preflight

    def check(config: Config) -> None:
        if config.is_dry:
            from toolkit.planner.dry_run import checked_run

            checked_run(config, os.environ, argv)
        else:
            preflight.raise_problems(config, world_size=rank_environment(os.environ).world_size)

    return preflight.load(argv, check)


def main(argv: Sequence[str]) -> int:
    """Run the training configured by ``argv`` and return the exit code."""
    rank, faults = 0, None
    checked = os.environ.get(CHECKED_DEVICE, "")
    try:
        os.environ |= (slurm := slurm_rank(os.environ))
        config = load_config(argv) if SUPERVISED in os.environ else _load(argv)
        debug = config.job.debug
        if config.is_dry:
            from toolkit.planner.dry_run import dry_run

            return dry_run(config, os.environ, argv)
        environment = rank_environment(os.environ)
        rank, world_size = environment.rank, environment.world_size
        if slurm and rank == 0:
            print(
                f"the {world_size} tasks of srun are the ranks of one run; WORLD_SIZE=1 trains in each alone"
            )
        if config.training.device == "cpu":  # before torch initializes CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        use_expandable_segments(os.environ)
        if SUPERVISED not in os.environ:  # otherwise the launcher has done this
            from toolkit import preflight

            hardware = preflight.hardware_of(config)
            preflight.check_and_print(config, world_size=world_size, hardware=hardware, show=rank == 0)
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
        # Failing to read data, or to find a device or memory, may happen on this rank alone; all ranks raise
        # other errors.
        alone = isinstance(error, DataError | DeviceError | OutOfMemory)
        return report(error, show=alone or tells_for_all(os.environ, environment), debug=debug)
    except Exception as error:
        if not faults or not faults.lost_peers(error):
            return report(error, show=True)
        if debug:
            traceback.print_exception(error)
        print(faults.failed(error), file=sys.stderr)
        return EXIT_ERROR


def _exit(code: int) -> NoReturn:
    """Exit with ``code``. After a failure, skip the interpreter's cleanup, which would wait for hanging
    collectives."""
    if code in (EXIT_FINISHED, EXIT_REQUEUE):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    standard_streams.protect()
    # Imports create no garbage, and collection slows them down; training collects at fixed steps.
    gc.disable()
    _exit(main(sys.argv[1:]))
