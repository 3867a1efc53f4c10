"""Runs that are killed again and again, and what is left of them.

A run of two ranks saves after every step. Each of its starts is killed by SIGKILL at a random moment, one in
two while a save is going on; then the next start must go on from the newest checkpoint, until one comes to
the end: with the losses, parameters and moments of a run that was never killed, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.dcp_storage import read_metadata, tensors_of
from toolkit.checkpoint.local_steps import leftovers
from toolkit.checkpoint.manifest import check_files, committed_steps, read_manifest, step_folder
from toolkit.checkpoint.read_tensor import read_tensor

ROOT = Path(__file__).parents[2]
STEPS, RANKS = 40, 2
TARGETS = ("one rank", "all ranks", "the launcher")
LIMIT = 120.0
"""Seconds in which a start must have ended, killed or not."""
_TRAINED = re.compile(r"^step +\d+/", re.MULTILINE)
_RESUMED = re.compile(r"resumed after step (\d+)")
_FLAGS = [
    "--job.config_file=train_configs/debug_model.toml", "--model.dim=64", "--model.n_layers=2",
    "--model.ffn_dim=160", "--training.seq_len=64", "--training.dataset=embedded_validation",
    f"--training.steps={STEPS}", "--lr_scheduler.warmup_steps=2", "--validation.enable=false",
    "--metrics.log_freq=1", "--metrics.enable_tensorboard=false", "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=3",
]  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """``target`` gets SIGKILL ``delay`` seconds after the start has begun its save number ``saves``; 0 is the
    start itself."""

    target: str
    saves: int
    delay: float

    @classmethod
    def at_random(cls, generator: random.Random) -> Kill:
        """Draw a kill: of four, one while it starts, one while it trains or saves, two within a tenth of a
        second of the beginning of a save."""
        saves, longest = generator.choice([(0, 8.0), (1, 1.0), *2 * [(generator.randint(1, 8), 0.1)]])
        return cls(generator.choice(TARGETS), saves, generator.uniform(0, longest))


@dataclass
class Outcome:
    """Results of one start: the kill that it was given and whether it was alive to get it, the steps that it
    went on from and that lay newest before, the newest after, and what is wrong."""

    kill: Kill | None
    killed: bool = False
    resumed: int = 0
    before: int = 0
    after: int = 0
    unfinished_save: bool = False
    problems: list[str] = field(default_factory=list)


def _newest(folder: Path) -> int:
    return max(committed_steps(folder / "checkpoint"), default=0)


def _ranks(launcher: int) -> list[int]:
    """Processes that the launcher has started."""
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except OSError:
        return []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(folder: Path, mode: str, kill: Kill | None) -> Outcome:
    """One start of the run in ``folder``, with saves by ``checkpoint.async_mode`` = ``mode``."""
    outcome = Outcome(kill, before=_newest(folder))
    log, old = folder / "log.txt", leftovers(folder / "checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "toolkit.launch", *_FLAGS, f"--job.dump_folder={folder}"]
    command += [f"--checkpoint.async_mode={mode}", f"--data.cache_folder={folder.parent / 'cache'}"]
    environment = os.environ | {"NGPU": str(RANKS), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    ranks: list[int] = []
    try:
        if kill:
            ranks = _kill(process, folder, kill, outcome, old)
        process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        outcome.problems.append(f"it did not end in {LIMIT:.0f} s")
        process.kill()
    _look(outcome, folder, log.read_text(errors="replace"), ranks, process.wait())
    outcome.unfinished_save = not set(leftovers(folder / "checkpoint")) <= set(old)
    return outcome


def _kill(
    process: subprocess.Popen[bytes], folder: Path, kill: Kill, outcome: Outcome, old: list[Path]
) -> list[int]:
    """Wait for the moment, then kill; the ranks that ran. ``old`` saves are not this start's."""
    checkpoints = folder / "checkpoint"
    seen: int = outcome.before
    left = {path.name for path in old}
    begun: set[str] = set()
    deadline = time.monotonic() + LIMIT
    while len(begun) < kill.saves and process.poll() is None and time.monotonic() < deadline:
        names = os.listdir(checkpoints) if checkpoints.is_dir() else []
        begun |= {name for name in names if ".tmp-" in name} - left
        seen = max([seen, *(int(name[5:]) for name in names if name[5:].isdecimal())])
        time.sleep(0.001)
    time.sleep(kill.delay)
    ranks = _ranks(process.pid)
    targets = {"one rank": ranks[-1:], "all ranks": ranks, "the launcher": []}[kill.target] or [process.pid]
    outcome.killed = process.poll() is None
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    outcome.after = seen
    return ranks


def _look(outcome: Outcome, folder: Path, said: str, ranks: list[int], code: int) -> None:
    """Check what must hold after any start."""
    seen, outcome.after = outcome.after, _newest(folder)
    problems = outcome.problems
    resumed = _RESUMED.search(said)
    outcome.resumed = int(resumed[1]) if resumed else 0
    if _TRAINED.search(said) and outcome.resumed != outcome.before:
        problems.append(f"it went on from step {outcome.resumed}, and {outcome.before} was there")
    if outcome.after < max(seen, outcome.before):
        problems.append(f"step {max(seen, outcome.before)} was committed and is lost")
    if not outcome.killed and code != 0:
        problems.append(f"it ended with code {code}, not killed:\n{said[-2000:]}")
    deadline = time.monotonic() + 15
    while (left := [pid for pid in ranks if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        problems.append(f"ranks {left} still run")
    checkpoints = folder / "checkpoint"
    for step in committed_steps(checkpoints):
        where = step_folder(checkpoints, step)
        problems += check_files(where, read_manifest(where)["files"], verify=True)


def result(folder: Path) -> Mapping[str, str]:
    """Results of a finished run: each step's loss as written, and each tensor's SHA-256."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {f"loss {record['step']}": repr(record["loss"]) for record in records if "loss" in record}
    last = step_folder(folder / "checkpoint", STEPS)
    metadata = read_metadata(last, read_manifest(last)["files"])
    tensors = {name: read_tensor(last, metadata, name) for name in tensors_of(metadata)}
    return losses | {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()
    }


def chain(
    folder: Path, mode: str, generator: random.Random, kills: int, expected: Mapping[str, str]
) -> list[Outcome]:
    """Kill the run of ``folder`` at most ``kills`` times, let it come to its end and compare that."""
    outcomes: list[Outcome] = []
    while _newest(folder) < STEPS:
        kill = Kill.at_random(generator) if len(outcomes) < kills else None
        outcomes.append(start(folder, mode, kill))
        if kill is None and outcomes[-1].problems:
            return outcomes
    found = result(folder)
    apart = [name for name in expected if found.get(name) != expected[name]]
    if apart or found.keys() != expected.keys():
        outcomes[-1].problems.append(f"the run that was never killed has other {', '.join(apart[:5])}")
    return outcomes
