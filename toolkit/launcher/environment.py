"""Environment variables, and a signal, by which a launcher and its ranks know of one another."""

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
"""Set for ranks whose launcher asks them where they are, and tells the user."""
CHECKED_DEVICE = "TOOLKIT_CHECKED_DEVICE"
"""In the environment of ranks: the device that the checks before them were made for."""
QUESTION = signal.SIGUSR2
"""A rank that gets it reports and ends."""


def environment_error(name: str, value: str, rule: str, fix: str = "") -> ConfigError:
    """A variable that cannot be what it is."""
    return ConfigError(
        Problem(rule, fix or f"set {name} to such a value, or unset it", name, value, "environment")
    )


def is_number(text: str) -> bool:
    """Return whether ``text`` is a nonnegative integer of a plausible length."""
    return text.isdecimal() and len(text) <= _DIGITS


def whole_number(
    environ: Mapping[str, str], name: str, default: int, least: int, most: float = math.inf
) -> int:
    """Return the integer in ``name``, or ``default`` if it is unset or empty.

    Raises:
        ConfigError: it is not a whole number from ``least`` to ``most``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not is_number(text) or not least <= int(text) <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise environment_error(name, text, f"{name} is a whole number {bounds}")
    return int(text)


def node_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """The least and the most nodes of NNODES, which is such as 4 or 2:4; 1 where it is unset or empty.

    Raises:
        ConfigError: it is neither.
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
    """This process's share of the cores, to fill its parts with; torch's own thread count is 1 under
    torchrun."""
    return max(1, cores() // whole_number(os.environ, "LOCAL_WORLD_SIZE", 1, 1))


def with_threads(environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """``environ`` for one of the ``processes`` of a launch here: each computes in its share of the cores,
    where OMP_NUM_THREADS does not say how many threads it has."""
    share = {"OMP_NUM_THREADS": str(max(1, cores() // processes))} if processes > 1 else {}
    return {**share, **environ}


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Count the tasks of this process's Slurm step: 1 outside of srun, as in a batch script, and in a shell
    that ``srun --pty`` gave a terminal.

    Raises:
        ConfigError: SLURM_STEP_NUM_TASKS is not such a number.
    """
    return 1 if os.isatty(0) else whole_number(environ, "SLURM_STEP_NUM_TASKS", 1, 1, MAX_RANKS)


def slurm_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's variables for one of several tasks of srun that has neither RANK nor WORLD_SIZE; empty
    for any other process. MASTER_ADDR and MASTER_PORT stay where they are set."""
    tasks = slurm_tasks(environ)
    if tasks == 1 or any(environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        return {}
    job, step = (whole_number(environ, name, 0, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    nodes = whole_number(environ, "SLURM_STEP_NUM_NODES", 1, 1, tasks)
    address = "127.0.0.1" if nodes == 1 else _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    gpus = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    alone = gpus and "," not in gpus  # as with --gpus-per-task=1
    return {
        "RANK": environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": "0" if alone else environ.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "").strip() or address,
        "MASTER_PORT": environ.get("MASTER_PORT", "").strip() or str(20000 + (job + step) % 20000),
    }


def _first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it.

    >>> _first_host("rack2-gpu[03-05,9],cpu1")
    'rack2-gpu03'
    """
    first = re.match(r"(\[[^]]*\]|[^,])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first.group()) if first else ""


@dataclass(frozen=True)
class RankEnvironment:
    """The numbers that a launcher gives each process it starts."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; a single process where they are unset or empty.

    Raises:
        ConfigError: they are no such numbers, or one of several ranks does not know its own or where
            they meet.
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
    """Return whether this process reports for all ranks: rank 0, or one whose variables are wrong."""
    try:
        return rank_environment(environ).rank == 0
    except ConfigError:
        return True


def shown_ranks(environ: Mapping[str, str], world_size: int, default: str) -> list[int]:
    """Return the existing ranks of LOG_RANK in ascending order; ``default`` is read if it is unset.

    Raises:
        ConfigError: it is not a list of ranks, or has none of the ``world_size`` that there are.
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
    """Return whether this rank of a run reports for all ranks: rank 0, and the first one that is shown."""
    try:
        first = shown_ranks(environ, here.world_size, default="0")[0]
    except ConfigError:  # of a torchrun that does not read it, or of more nodes than there are now
        first = 0
    return here.rank in (0, first)
