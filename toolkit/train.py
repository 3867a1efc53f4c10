"""A training process: ``python -m toolkit.train --job.config_file FILE [--table.key value …]``.

One process by itself, or one of many under ``run_train.sh`` or torchrun. The configuration is checked
before torch is imported, so that a mistake costs a fraction of a second. Exit codes: `toolkit.errors`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import preflight
from toolkit.config import Config, load_config
from toolkit.corpora import open_data
from toolkit.errors import DataError, OutOfMemory, ToolkitError, report
from toolkit.hardware import detect


def _check(config: Config, rank: int) -> None:
    """Run the preflight on every rank; rank 0 says what is about to run."""
    world_size, hardware = int(os.environ.get("WORLD_SIZE", "1")), detect()
    preflight.run(config, world_size=world_size, hardware=hardware)
    if rank > 0:
        return
    if config.job.print_config:
        print(config.to_toml())
    print(preflight.describe(config, world_size=world_size, hardware=hardware))


def _train(config: Config) -> int:
    import torch

    from toolkit.distributed import flight_recorder, process_group
    from toolkit.metrics.memory import out_of_memory_advice
    from toolkit.metrics.phases import Phases
    from toolkit.trainer import Trainer

    chief = os.environ.get("RANK", "0") == "0"
    phases = Phases(enabled=chief)
    with phases("tokenizer and tokens"):
        data = open_data(config, progress=chief)
    device = process_group.local_device()
    flight_recorder.enable(config.comm.trace_buf_size, _collectives(config))
    with phases("process group"):
        process_group.start(device, timeout_seconds=config.comm.init_timeout_seconds)
    try:
        trainer = Trainer(config, data, device, phases)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(out_of_memory_advice(device, 0, error)) from error
    code = trainer.run()
    # Only here: after an error, leaving the group would wait for peers that wait for us.
    process_group.stop()
    return code


def _collectives(config: Config) -> Path:
    """What the names of the files that tell of failed collectives begin with."""
    folder = Path(config.job.dump_folder).expanduser() / config.comm.save_traces_folder
    return folder / config.comm.save_traces_file_prefix


def _tell_collectives(config: Config, rank: int) -> None:
    """A rank that died or hung is seen by the others as a collective that fails."""
    from toolkit.distributed import flight_recorder

    told = flight_recorder.write(_collectives(config), rank)
    if told:
        print(told, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the training that ``argv`` describes and return the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    debug = "--debug" in argv
    try:
        config = load_config(argv)
        debug = config.job.debug
        if config.comm.mode == "fake_backend":
            from toolkit.plan.dry_run import dry_run

            return dry_run(config, os.environ)
        _check(config, rank)
    except ToolkitError as error:  # the same on every rank
        return report(error, show=rank == 0, debug=debug)
    try:
        return _train(config)
    except ToolkitError as error:
        # A rank may be alone in failing to read or to find memory; the other errors are agreed upon.
        return report(error, show=rank == 0 or isinstance(error, DataError | OutOfMemory), debug=debug)
    except Exception as error:
        code = report(error, show=True)
        if isinstance(error, RuntimeError) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _tell_collectives(config, rank)
        return code


if __name__ == "__main__":
    # Until the training listens, Ctrl-C simply ends the process: a traceback would say nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
