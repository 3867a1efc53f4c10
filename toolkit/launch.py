"""Start one training process per device, forward signals, and exit with the exit code of the ranks.

    NGPU=8 python -m toolkit.launch --job.config_file FILE [--table.key value …]

All arguments are passed to ``toolkit.train``; environment variables describe the launch
(:func:`launch_from`). The configuration is checked before any rank starts. If SAMPLE is set, a finished run
prints the model's continuation of that text.

The ranks of a single-node run rendezvous at a port that the launcher reserves. With several nodes, the
launchers rendezvous and restart after failures (``launcher/nodes.py``). Nothing here imports torch: to start
two empty ranks on a 2-core machine, torchrun takes 2.5 s, mostly for its imports, and this launcher takes 0.4
s (benchmarks/startup.py). torchrun can start ``toolkit.train`` too, but it turns every exit code into 1, is
killed by SIGUSR1, and kills ranks that take more than 30 s to save.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until handlers are installed, Ctrl-C just ends the process: a traceback out of an import helps nobody.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from toolkit import preflight
from toolkit.config import Config, asks_for_tracebacks, load_config
from toolkit.config.local_paths import expand_user
from toolkit.config.types import MAX_RANKS, MAX_SECONDS
from toolkit.data.build import open_data
from toolkit.data.run_data import TOKENS
from toolkit.errors import EXIT_FINISHED, EXIT_REQUEUE, ConfigError, ToolkitError, report
from toolkit.hardware import Hardware
from toolkit.io import standard_streams
from toolkit.launcher.environment import (
    CHECKED_DEVICE,
    environment_error,
    node_range,
    shown_ranks,
    slurm_tasks,
    whole_number,
)
from toolkit.launcher.signals import Stopped, stop_at_once
from toolkit.launcher.supervise import supervise
from toolkit.launcher.supervisor import Launch, say


def launch_from(environ: Mapping[str, str], hardware: Hardware) -> Launch:
    """Read NGPU, LOG_RANK, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and SHUTDOWN_TIMEOUT.

    Raises:
            ConfigError: a value is invalid, there are more ranks than GPUs, a node lacks the address of node
                0, or several srun tasks would each launch a run.
    """
    if not environ.get("NNODES", "").strip() and (tasks := slurm_tasks(environ)) > 1:
        raise environment_error(
            "NNODES",
            "",
            f"srun starts {tasks} tasks, and each would launch a run of its own",
            "set NNODES, NODE_RANK=$SLURM_NODEID and MASTER_ADDR, as tools/slurm/train.sbatch does; start "
            "python -m toolkit.train in their place; or set NNODES=1 for separate runs",
        )
    processes = whole_number(environ, "NGPU", hardware.count, 1, MAX_RANKS)
    if hardware.device == "cuda" and processes > hardware.count:
        raise environment_error(
            "NGPU",
            str(processes),
            f"each rank needs a GPU of its own, and {hardware.count} are visible here",
            f"set NGPU to at most {hardware.count}, or train on the CPU with --training.device cpu",
        )
    _, nodes = node_range(environ)
    node_rank = whole_number(environ, "NODE_RANK", 0, 0)
    if node_rank >= nodes:
        rule = f"with NNODES = {nodes} it is below {nodes}"
        fix = "" if "NNODES" in environ else "set NNODES to the number of nodes, or unset NODE_RANK"
        raise environment_error("NODE_RANK", str(node_rank), rule, fix)
    address, port = "127.0.0.1", 0  # single-node runs ignore what an outer job exports, so none collide
    if nodes > 1:
        address, port = _meeting(environ)
        if not address:
            raise environment_error(
                "MASTER_ADDR", "", f"{nodes} nodes meet at the first one", "set MASTER_ADDR to its host name"
            )
    return Launch(
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        shown=frozenset(shown_ranks(environ, processes * nodes, default="0")),
        shutdown_timeout=float(whole_number(environ, "SHUTDOWN_TIMEOUT", 600, 1, MAX_SECONDS)),
    )


def _meeting(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port of node 0.

    Raises:
        ConfigError: the address contains a port, or MASTER_PORT is not a port.
    """
    address = environ.get("MASTER_ADDR", "")
    host, colon, port = address.partition(":")
    if colon and ":" not in port:  # more colons are an IPv6 address
        fix = f"set MASTER_ADDR={host} MASTER_PORT={port}"
        raise environment_error("MASTER_ADDR", address, "it is a host without a port", fix)
    return address, whole_number(environ, "MASTER_PORT", 29500, 1, 65535)


def _stay_away(error: ToolkitError) -> None:
    """Report to node 0, if the environment has its address, that this node will not join."""
    with suppress(ConfigError):
        node, (address, port) = whole_number(os.environ, "NODE_RANK", 0, 0), _meeting(os.environ)
        if node and address:
            from toolkit.launcher.nodes import stay_away

            stay_away(node, address, port, error)


def main(argv: Sequence[str]) -> int:
    """Check the configuration of ``argv``, tokenize its corpus, then run ``toolkit.train``."""
    try:
        with stop_at_once():
            config = preflight.load(argv, lambda valid: _check(valid, argv))
            hardware, launch = _plan(config, argv)
            tell = launch.node_rank == 0
            several = launch.nodes > 1 or bool(os.environ.get("MAX_RESTARTS"))
            words, world_size = [*argv], launch.world_size
            if several:
                from toolkit.preflight.several_nodes import at_full_size, run_nodes

                words, world_size = at_full_size(config, argv, launch)
                config = load_config(words)
            preflight.check_and_print(config, world_size=world_size, hardware=hardware, show=tell)
            if not several:
                _prepare(config, launch, hardware)
    except ToolkitError as error:
        code = report(error, show=True, debug=asks_for_tracebacks(argv))
        _stay_away(error)
        return code
    except Stopped as stopped:
        say(f"{stopped.name}: stopped before the ranks started; the same command starts again")
        return EXIT_REQUEUE
    reports = None
    if launch.world_size > 1 and not several:
        from toolkit.launcher.fault_reports import traces_prefix

        reports = traces_prefix(config.job, config.comm)
    forecast = None
    if tell and hardware.memory:
        from toolkit.launcher.forecast import Forecast, measured

        forecast = Forecast(words, world_size, earlier=measured(config))
    command = [sys.executable, "-u", "-m", "toolkit.train", *argv]
    try:
        code = (
            run_nodes(command, config, argv, launch, hardware, lambda: _prepare(config, launch, hardware))
            if several
            else supervise(command, launch, reports)
        )
    except ToolkitError as error:
        code = report(error, show=True, debug=config.job.debug)
    if forecast:
        forecast.end(config)
    if code == EXIT_FINISHED and tell and os.environ.get("SAMPLE"):
        _show_text(config, os.environ["SAMPLE"])
    return code


def _plan(config: Config, argv: Sequence[str]) -> tuple[Hardware, Launch]:
    """Detect the hardware and read the launch settings. A dry run needs torch and runs in one process."""
    if config.is_dry:
        os.execv(sys.executable, [sys.executable, "-m", "toolkit.train", *argv])
    hardware = preflight.hardware_of(config)
    return hardware, launch_from(os.environ, hardware)


def _check(config: Config, argv: Sequence[str]) -> None:
    """Check the valid settings of a configuration that also has invalid ones."""
    hardware, launch = _plan(config, argv)
    if not config.parallelism.elastic_meshes:  # they change the mesh of a launch
        preflight.raise_problems(config, world_size=launch.world_size, hardware=hardware)


def _prepare(config: Config, launch: Launch, hardware: Hardware) -> None:
    """Tokenize the corpus, and pass the tokenized data and the device to the ranks in the environment."""
    data = open_data(config, progress=True)
    os.environ |= {CHECKED_DEVICE: hardware.device, TOKENS: data.text()}
    ranks = f"{launch.processes} ranks" if launch.processes > 1 else "1 rank"
    begin = "starting" if launch.nodes == 1 else "ready for"
    say(f"configuration checked, corpus tokenized; {begin} {ranks}")


def _show_text(config: Config, prompt: str) -> None:
    """Print the trained model's continuation of ``prompt``, and the command to generate more."""
    from toolkit.checkpoint.manifest import committed_steps

    saved = expand_user(config.checkpoint.folder, inside=expand_user(config.job.dump_folder))
    if not config.checkpoint.enable or not committed_steps(saved):
        return
    command = ["-m", "toolkit", "generate", str(saved), "--prompt", prompt]
    say(f"how the model continues {prompt!r}:")
    subprocess.run([sys.executable, *command, "--max-new-tokens", "80"], check=False)
    say(f"for more: {sys.executable} {shlex.join(command)}")


if __name__ == "__main__":
    standard_streams.protect()
    sys.exit(main(sys.argv[1:]))
