"""Environment variables, and a signal, for communication between a launcher and its ranks."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config.types import MAX_RANKS
from toolkit.errors import ConfigError, Problem
from toolkit.hardware import cores

_DIGITS = 18
SUPERVISED = "TOOLKIT_SUPERVISED"
"""Set for ranks whose launcher asks them for their location in the code and reports it to the user."""
CHECKED_DEVICE = "TOOLKIT_CHECKED_DEVICE"
"""Environment variable of ranks: the device for which the launcher's checks were made."""
QUESTION = signal.SIGUSR2
"""Signal on which a rank reports its location and exits."""


def environment_error(name: str, value: str, rule: str, fix: str = "") -> ConfigError:
    """Build the error for an invalid environment variable."""
    return ConfigError(
        Problem(rule, fix or f"set {name} to such a value, or unset it", name, value, "environment")
    )


def is_number(text: str) -> bool:
    """Return whether ``text`` is a nonnegative integer of plausible length."""
    return text.isdecimal() and len(text) <= _DIGITS


def whole_number(
    environ: Mapping[str, str], name: str, default: int, least: int, most: float = math.inf
) -> int:
    """Return the integer in the variable ``name``, or ``default`` if it is unset or empty.

    Raises:
        ConfigError: the value is not an integer from ``least`` to ``most``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not is_number(text) or not least <= int(text) <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise environment_error(name, text, f"{name} is a whole number {bounds}")
    return int(text)


def node_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes in NNODES, such as 4 or 2:4; 1 if it is unset or empty.

    Raises:
        ConfigError: the value has neither form.
    """
    text = environ.get("NNODES", "").strip()
    first, colon, last = text.partition(":")
    if not colon:
        nodes = whole_number(environ, "NNODES", 1, 1, MAX_RANKS)
        return nodes, nodes
    least, most = (int(each) if is_number(each.strip()) else 0 for each in (first, last))
    if not 1 <= least <= most <= MAX_RANKS:
        rule = "NNODES is a number of nodes, or the least and the most with a colon between"
        raise environment_error("NNODES", text, rule, "set it to such as 4 or 2:4")
    return least, most


def threads() -> int:
    """Return this process's share of the CPU cores, as a thread count; under torchrun, torch's own thread
    count is 1."""
    return max(1, cores() // whole_number(os.environ, "LOCAL_WORLD_SIZE", 1, 1))


def with_threads(environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return ``environ`` for one of ``processes`` processes on this machine. OMP_NUM_THREADS, unless set, is
    the process's share of the cores."""
    share = {"OMP_NUM_THREADS": str(max(1, cores() // processes))} if processes > 1 else {}
    return {**share, **environ}


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks in this process's Slurm step; 1 outside srun (also in a batch script) and in
    a terminal from ``srun --pty``.

    Raises:
        ConfigError: SLURM_STEP_NUM_TASKS is not a valid number.
    """
    return 1 if os.isatty(0) else whole_number(environ, "SLURM_STEP_NUM_TASKS", 1, 1, MAX_RANKS)


def slurm_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the rank variables of a task of a multi-task srun without RANK and WORLD_SIZE; empty for any
    other process. MASTER_ADDR and MASTER_PORT are kept if set."""
    tasks = slurm_tasks(environ)
    if tasks == 1 or any(environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        return {}
    job, step = (whole_number(environ, name, 0, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = whole_number(environ, "SLURM_STEP_NUM_NODES", 1, 1, tasks)
    address = "127.0.0.1" if nodes == 1 else _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    gpus = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    alone = gpus and "," not in gpus  # one visible GPU, as with --gpus-per-task=1
    return {
        "RANK": environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": "0" if alone else environ.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "").strip() or address,
        "MASTER_PORT": environ.get("MASTER_PORT", "").strip() or str(20000 + (job + step) % 20000),
    }


def _first_host(hosts: str) -> str:
    """Return the first host of a Slurm host list.

    >>> _first_host("rack2-gpu[03-05,9],cpu1")
    'rack2-gpu03'
    """
    first = re.match(r"(\[[^]]*\]|[^,])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first.group()) if first else ""


@dataclass(frozen=True)
class RankEnvironment:
    """The rank numbers that a launcher assigns to a process."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; unset or empty variables mean a single process.

    Raises:
        ConfigError: the values are not valid numbers, or one of several ranks lacks its own number or the
            rendezvous address.
    """
    world_size = whole_number(environ, "WORLD_SIZE", 1, 1, MAX_RANKS)
    rank = whole_number(environ, "RANK", 0, 0)
    if rank >= world_size:
        raise environment_error("RANK", str(rank), f"with WORLD_SIZE = {world_size} it is below {world_size}")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ():
        if not environ.get(name, "").strip():
            rule = f"WORLD_SIZE = {world_size} speaks of several ranks, and {name} is not set"
            fix = "start them with run_train.sh or torchrun, which set it, or unset WORLD_SIZE"
            raise environment_error(name, "", rule, fix)
    return RankEnvironment(rank, whole_number(environ, "LOCAL_RANK", 0, 0), world_size)


def is_reporting_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process reports for all ranks: rank 0, or a rank with invalid variables."""
    try:
        return rank_environment(environ).rank == 0
    except ConfigError:
        return True


def shown_ranks(environ: Mapping[str, str], world_size: int, default: str) -> list[int]:
    """Return the ranks of LOG_RANK that exist, in ascending order; ``default`` is used if it is unset.

    Raises:
        ConfigError: it is not a list of ranks, or none of them is below ``world_size``.
    """
    shown = environ.get("LOG_RANK", "").strip() or default
    if not all(is_number(item.strip()) for item in shown.split(",")):
        raise environment_error("LOG_RANK", shown, "LOG_RANK is a list of ranks such as 0,1")
    ranks = sorted({int(item) for item in shown.split(",") if int(item) < world_size})
    if not ranks:
        rule = f"none of the {world_size} ranks would be heard"
        raise environment_error("LOG_RANK", shown, rule, "name at least one that there is: they start at 0")
    return ranks


def tells_for_all(environ: Mapping[str, str], here: RankEnvironment) -> bool:
    """Return whether this rank of a run reports for all ranks, as rank 0 and the first shown rank do."""
    try:
        first = shown_ranks(environ, here.world_size, default="0")[0]
    except ConfigError:  # torchrun does not read the variable, or it names ranks of nodes that left
        first = 0
    return here.rank in (0, first)
