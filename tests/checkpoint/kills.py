"""Runs that are killed again and again, and what is left of them.

A run of two ranks saves after every step. Each of its starts is killed by SIGKILL at a random moment, one in
two while a save is going on; then the next start must go on from the newest checkpoint, until one comes to
the end: with the losses, parameters and moments of a run that was never killed, to the last bit.

With a ``server`` the checkpoints are in object storage, which falls as well, killed or stalled, at random
moments of each start, and comes back.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread

from tests.processes import children, runs
from tests.s3_server import BUCKET, Server
from toolkit.checkpoint.dcp_storage import read_metadata, tensor_entries
from toolkit.checkpoint.manifest import check_files, committed_steps, read_manifest, step_folder
from toolkit.checkpoint.read_tensor import read_tensor
from toolkit.checkpoint.retention import step_storage
from toolkit.config.local_paths import expand_user

ROOT = Path(__file__).parents[2]
STEPS, RANKS = 40, 2
TARGETS = ("one rank", "all ranks", "the launcher")
LIMIT = 120.0
"""Seconds in which a start must have ended, killed or not."""
_TRAINED = re.compile(r"^step +\d+/", re.MULTILINE)
_RESUMED = re.compile(r"resumed after step (\d+)")
_FLAGS = [
    "--model.dim=64", "--model.n_layers=2", "--training.seq_len=64", "--training.dataset=embedded_validation",
    f"--training.steps={STEPS}", "--lr_scheduler.warmup_steps=2", "--validation.enable=false",
    "--metrics.log_freq=1", "--metrics.enable_tensorboard=false", "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=3",
]  # fmt: skip
MODELS = {
    "dense": ["--job.config_file=train_configs/debug_model.toml", "--model.ffn_dim=160"],
    # The second block has experts, a half of them on each rank, whose biases are buffers.
    "experts": [
        "--job.config_file=train_configs/debug_moe.toml", "--model.name=deepseek_v3", "--model.n_kv_heads=4",
        "--parallelism.expert_parallel_degree=2",
    ],
}  # fmt: skip


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
    falls: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def checkpoints_of(folder: Path, server: Server | None = None) -> Path:
    """Where the run in ``folder`` has its checkpoints."""
    return expand_user(f"s3://{BUCKET}/{folder.name}") if server else folder / "checkpoint"


def _newest(checkpoints: Path) -> int:
    return max(committed_steps(checkpoints), default=0)


def start(
    folder: Path, mode: str, kill: Kill | None, server: Server | None = None, model: str = "dense"
) -> Outcome:
    """One start of the run of a model in ``folder``, with saves by ``checkpoint.async_mode`` = ``mode``."""
    checkpoints = checkpoints_of(folder, server)
    outcome = Outcome(kill, before=_newest(checkpoints))
    log, old = folder / "log.txt", step_storage(checkpoints).leftovers(checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "toolkit.launch", *MODELS[model], *_FLAGS]
    command += [f"--job.dump_folder={folder}"]
    command += [f"--checkpoint.async_mode={mode}", f"--data.cache_folder={folder.parent / 'cache'}"]
    environment = os.environ | {"NGPU": str(RANKS), "OMP_NUM_THREADS": "1"}
    if server:
        command.append(f"--checkpoint.folder={checkpoints}")
        environment |= server.environment
        server.requests()
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
    over = Event()
    falling = Thread(
        target=_fall, args=(server, over, random.Random(outcome.before), outcome.falls), daemon=True
    )
    try:
        if server:
            falling.start()
        if kill:
            saves = _begun(checkpoints, {path.name for path in old}) if server is None else _put(server)
            ranks = _kill(process, saves, kill, outcome)
        process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        outcome.problems.append(f"it did not end in {LIMIT:.0f} s")
        process.kill()
    finally:
        over.set()
    process.wait()
    if server:
        falling.join()
    _look(outcome, checkpoints, log.read_text(errors="replace"), ranks, process.wait())
    outcome.unfinished_save = not set(step_storage(checkpoints).leftovers(checkpoints)) <= set(old)
    return outcome


def _fall(server: Server, over: Event, generator: random.Random, falls: list[str]) -> None:
    """Have the server fall again and again until a start is ``over``."""
    while not over.wait(generator.uniform(0, 15)):
        how = generator.choice(("killed", "stalled"))
        falls.append(how)
        server.fall(how, generator.uniform(0.1, 6))


def _begun(checkpoints: Path, old: set[str]) -> Iterator[tuple[int, int]]:
    """Saves that were begun, and the newest step that was committed, until now; ``old`` ones do not count."""
    begun: set[str] = set()
    newest = 0
    while True:
        names = os.listdir(checkpoints) if checkpoints.is_dir() else []
        begun |= {name for name in names if ".tmp-" in name} - old
        newest = max([newest, *(int(name[5:]) for name in names if name[5:].isdecimal())])
        yield len(begun), newest


def _put(server: Server) -> Iterator[tuple[int, int]]:
    """Do the same by the requests that the server got: a save begins when the one before was committed."""
    begun: set[int] = set()
    while True:
        with suppress(OSError, HTTPException, ValueError):  # it has fallen
            asked = [request for request in server.requests() if request.startswith("PUT")]
            begun |= {int(step) for request in asked for step in re.findall(r"/step-(\d+)/__", request)}
        yield len(begun), max(begun, default=1) - 1


def _kill(
    process: subprocess.Popen[bytes], saves: Iterator[tuple[int, int]], kill: Kill, outcome: Outcome
) -> list[int]:
    """Wait for the moment, then kill; the ranks that ran."""
    begun, seen = 0, outcome.before
    deadline = time.monotonic() + LIMIT
    while begun < kill.saves and process.poll() is None and time.monotonic() < deadline:
        begun, newest = next(saves)
        seen = max(seen, newest)
        time.sleep(0.001)
    time.sleep(kill.delay)
    ranks = children(process.pid)
    targets = {"one rank": ranks[-1:], "all ranks": ranks, "the launcher": []}[kill.target] or [process.pid]
    outcome.killed = process.poll() is None
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    outcome.after = seen
    return ranks


def _look(outcome: Outcome, checkpoints: Path, said: str, ranks: list[int], code: int) -> None:
    """Check what must hold after any start."""
    seen, outcome.after = outcome.after, _newest(checkpoints)
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
    while (left := [pid for pid in ranks if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        problems.append(f"ranks {left} still run")
    for step in committed_steps(checkpoints):
        where = step_folder(checkpoints, step)
        problems += check_files(where, read_manifest(where)["files"], verify=True)


def result(folder: Path, server: Server | None = None) -> Mapping[str, str]:
    """Results of a finished run: each step's loss as written, and each tensor's SHA-256."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {f"loss {record['step']}": repr(record["loss"]) for record in records if "loss" in record}
    last = step_folder(checkpoints_of(folder, server), STEPS)
    metadata = read_metadata(last, read_manifest(last)["files"])
    tensors = {name: read_tensor(last, metadata, name) for name in tensor_entries(metadata)}
    return losses | {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()
    }


def chain(
    folder: Path,
    mode: str,
    generator: random.Random,
    kills: int,
    expected: Mapping[str, str],
    server: Server | None = None,
    model: str = "dense",
) -> list[Outcome]:
    """Kill the run of ``folder`` at most ``kills`` times, let it come to its end and compare that."""
    outcomes: list[Outcome] = []
    while _newest(checkpoints_of(folder, server)) < STEPS:
        kill = Kill.at_random(generator) if len(outcomes) < kills else None
        outcomes.append(start(folder, mode, kill, server, model))
        if kill is None and outcomes[-1].problems:
            return outcomes
    found = result(folder, server)
    apart = [name for name in expected if found.get(name) != expected[name]]
    if apart or found.keys() != expected.keys():
        outcomes[-1].problems.append(f"the run that was never killed has other {', '.join(apart[:5])}")
    return outcomes
