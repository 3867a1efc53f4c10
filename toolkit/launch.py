"""Start one training process a device, pass signals on, and end with the code the ranks ended with.

    NGPU=8 python -m toolkit.launch --job.config_file FILE [--table.key value …]

Every argument belongs to ``toolkit.train``; the launch itself is described by environment variables
(:func:`launch_from`). The configuration is checked here, before any rank starts.

The ranks meet at MASTER_ADDR:MASTER_PORT, as with torchrun's static rendezvous, so nothing here needs
torch. For two ranks that do nothing torchrun takes 1.5 s on a 2-core machine, most of it its own imports,
and this 0.1 s (benchmarks/startup.py). torchrun would also turn every exit code into 1, die of SIGUSR1 and
kill the ranks 30 s into a save. Elastic restarts remain torchrun's: it can start ``toolkit.train`` too.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence

from toolkit import preflight
from toolkit.config import load_config
from toolkit.corpora import open_data
from toolkit.distributed.supervisor import Launch, say, supervise
from toolkit.errors import ConfigError, Problem, ToolkitError, report
from toolkit.hardware import Hardware, detect


def _integer(environ: Mapping[str, str], name: str, default: int, least: int, most: float = math.inf) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise _environment_error(name, text, f"{name} is a whole number {bounds}")
    return int(text)


def _environment_error(name: str, value: str, rule: str, fix: str = "") -> ConfigError:
    return ConfigError(
        Problem(rule, fix or f"set {name} to such a value, or unset it", name, value, "environment")
    )


def launch_from(environ: Mapping[str, str], hardware: Hardware) -> Launch:
    """Read NGPU, LOG_RANK, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and SHUTDOWN_TIMEOUT.

    Raises:
        ConfigError: a value is no such number, more ranks than GPUs are asked for, or one of several
            nodes does not know the address of the first.
    """
    processes = _integer(environ, "NGPU", hardware.count, 1)
    if hardware.device == "cuda" and processes > hardware.count:
        raise _environment_error(
            "NGPU",
            str(processes),
            f"each rank needs a GPU of its own, and {hardware.count} are visible here",
            f"set NGPU to at most {hardware.count}, or train on the CPU with CUDA_VISIBLE_DEVICES=",
        )
    nodes = _integer(environ, "NNODES", 1, 1)
    node_rank = _integer(environ, "NODE_RANK", 0, 0)
    if node_rank >= nodes:
        raise _environment_error("NODE_RANK", str(node_rank), f"with NNODES = {nodes} it is below {nodes}")
    address, port = "127.0.0.1", 0  # whatever an outer job exports: runs on one node do not meet
    if nodes > 1:
        address, port = environ.get("MASTER_ADDR", ""), _integer(environ, "MASTER_PORT", 29500, 1, 65535)
        if not address:
            raise _environment_error(
                "MASTER_ADDR", "", f"{nodes} nodes meet at the first one", "set MASTER_ADDR to its host name"
            )
    shown = environ.get("LOG_RANK", "").strip() or "0"
    if not all(item.strip().isdecimal() for item in shown.split(",")):
        raise _environment_error("LOG_RANK", shown, "LOG_RANK is a list of ranks such as 0,1")
    if all(int(item) >= processes * nodes for item in shown.split(",")):
        rule = f"none of the {processes * nodes} ranks would be heard"
        raise _environment_error("LOG_RANK", shown, rule, "name at least one that there is: they start at 0")
    return Launch(
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        shown=frozenset(int(item) for item in shown.split(",")),
        shutdown_timeout=float(_integer(environ, "SHUTDOWN_TIMEOUT", 600, 1)),
    )


def main(argv: Sequence[str]) -> int:
    """Check the configuration that ``argv`` describes, tokenise its corpus, then run ``toolkit.train``."""
    try:
        config = load_config(argv)
        hardware = detect()
        launch = launch_from(os.environ, hardware)
        preflight.run(config, world_size=launch.world_size, hardware=hardware)
        open_data(config, progress=True)
    except ToolkitError as error:
        return report(error, show=True, debug="--debug" in argv)
    ranks = f"{launch.processes} ranks" if launch.processes > 1 else "1 rank"
    say(f"configuration checked, corpus tokenised; starting {ranks}")
    return supervise([sys.executable, "-u", "-m", "toolkit.train", *argv], launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
