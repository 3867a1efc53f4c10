"""Faults on two nodes while they train, at random moments, and what must hold after each.

A run of two nodes saves after every step. Each of its starts gets a fault: it must be named by every launcher
that is left, within a minute, and leave no process. The next start goes on from the newest checkpoint, until
one comes to the end, with the losses of a run that was never disturbed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes import TINY, Cluster, Started, eventually, losses, newest

KINDS = ("a rank killed", "a launcher killed", "a node without power", "a link cut", "a link slow")
STEPS = 40
NAMED_WITHIN = 60.0
"""Seconds; a node that never came is named after JOIN_TIMEOUT."""
LIMIT = 150.0
JOIN_SECONDS = 45
SLOW = "3mbit"
_FLAGS = [*TINY, f"--training.steps={STEPS}", "--checkpoint.interval=1"]
_RESUMED = re.compile(r"resumed after step (\d+)")
_TRAINED = re.compile(r"^step +\d+/", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``node``, ``delay`` seconds after the start has begun its save number ``saves``; 0
    is the start itself."""

    kind: str
    node: int
    saves: int
    delay: float

    @classmethod
    def at_random(cls, kind: str, generator: random.Random) -> Fault:
        """Draw a moment: of four, one while it starts, one in a step, two within a tenth of a second of a
        save's beginning. A slow link is felt only where something is sent."""
        moments = [(0, 15.0), (1, 2.0), *2 * [(generator.randint(1, 8), 0.1)]]
        saves, longest = generator.choice(moments[kind == "a link slow" :])
        return cls(kind, generator.randrange(2), saves, generator.uniform(0, longest))


@dataclass
class Outcome:
    """Results of one start: its fault and whether it was still running to get it, the seconds until every
    launcher that was left had ``named`` it and until all had ``ended``, and what is wrong."""

    fault: Fault | None
    hit: bool = False
    named: float = 0.0
    ended: float = 0.0
    before: int = 0
    after: int = 0
    problems: list[str] = field(default_factory=list)


def start(made: Cluster, folder: Path, fault: Fault | None) -> Outcome:
    """One start of the run in ``folder``, on two nodes that have nothing running, and are left so."""
    outcome = Outcome(fault, before=newest(folder))
    for node in made.nodes:
        node.restart()
    flags = [*_FLAGS, f"--job.dump_folder={folder}", f"--data.cache_folder={folder.parent}/cache"]
    started = [node.launch(*flags, JOIN_TIMEOUT=str(JOIN_SECONDS)) for node in made.nodes]
    left = list(started)
    try:
        if fault and _wait_for_moment(folder, fault, started):
            outcome.hit = True
            begun, seen = time.monotonic(), newest(folder)
            left = _make(made, fault, started)
            _name(outcome, fault, left, begun)
            if fault.kind == "a link slow":
                made.nodes[fault.node].fast()
                left[0].signal(signal.SIGTERM)
            _end(outcome, left, begun)
            if newest(folder) < seen:
                outcome.problems.append(f"step {seen} was saved and is lost")
        else:
            _end(outcome, left, time.monotonic())
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
    _look(outcome, made, folder, started, left)
    return outcome


def _wait_for_moment(folder: Path, fault: Fault, started: list[Started]) -> bool:
    """Say if the run still goes on then."""
    checkpoints, begun, old = folder / "checkpoint", set[str](), _saves(folder / "checkpoint")
    deadline = time.monotonic() + LIMIT
    while len(begun) < fault.saves and _running(started) and time.monotonic() < deadline:
        begun |= _saves(checkpoints) - old
        time.sleep(0.001)
    time.sleep(fault.delay)
    if fault.kind == "a rank killed":
        eventually(lambda: started[fault.node].ranks() or not _running(started), LIMIT)
    return _running(started)


def _saves(checkpoints: Path) -> set[str]:
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return {name.partition(".tmp-")[0] for name in names if name.startswith("step-")}


def _running(started: list[Started]) -> bool:
    return all(one.process.poll() is None for one in started)


def _make(made: Cluster, fault: Fault, started: list[Started]) -> list[Started]:
    """Make the fault; the launchers that are left to tell of it."""
    node, launcher = made.nodes[fault.node], started[fault.node]
    others = [one for one in started if one is not launcher]
    if fault.kind == "a rank killed":
        for rank in launcher.ranks():
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        return started
    if fault.kind == "a launcher killed":
        launcher.signal(signal.SIGKILL)
        return others
    if fault.kind == "a node without power":
        node.power_off()
        return others
    if fault.kind == "a link cut":
        node.cut()
    else:
        node.slow(SLOW)
    return started


def _name(outcome: Outcome, fault: Fault, left: list[Started], begun: float) -> None:
    """Wait until all that are left have named what happened."""
    number, host = fault.node, f"host{fault.node}"
    never = ["node 1 of NNODES = 2 did not come", "node 0 does not answer"]
    gone = [rf"node {number} \(.*\) is lost", *never]
    patterns = {
        "a rank killed": [rf"rank {number} \(local rank 0 on {host}\) was ended by SIGKILL"],
        "a launcher killed": gone,
        "a node without power": gone,
        # Each side of a cut has lost the other.
        "a link cut": [
            r"node [01] \(.*\) is lost",
            "node 1 of NNODES = 2 did not come",
            "node 0 does not answer",
        ],
        "a link slow": [r"node 1 \(host1\) is slow: "],
    }[fault.kind]
    tellers = left[:1] if fault.kind == "a link slow" else left
    said = re.compile("|".join(patterns))

    def named() -> bool:
        return all(said.search(one.text) for one in tellers)

    def over() -> bool:
        """The run came to its end before it felt the link."""
        ended = [one.process.poll() for one in left]
        return fault.kind == "a link slow" and ended == [0] * len(left)

    eventually(lambda: named() or over(), NAMED_WITHIN)
    if named():
        outcome.named = time.monotonic() - begun
    elif over():
        outcome.hit = False
    else:
        told = "\n".join(one.text[-1500:] for one in tellers)
        outcome.problems.append(f"not named within {NAMED_WITHIN:.0f} s:\n{told}")


def _end(outcome: Outcome, left: list[Started], begun: float) -> None:
    allowed = {None: (0,), "a link slow": (0, 75)}.get(outcome.fault and outcome.fault.kind, (1,))
    if not outcome.hit:
        allowed = (0,)
    for one in left:
        try:
            code = one.wait(LIMIT)
        except AssertionError as error:
            outcome.problems.append(str(error))
        else:
            if code not in allowed:
                outcome.problems.append(f"a launcher ended with {code}:\n{one.text[-2000:]}")
    outcome.ended = time.monotonic() - begun


def _look(outcome: Outcome, made: Cluster, folder: Path, started: list[Started], left: list[Started]) -> None:
    """Check what must hold after any start."""
    eventually(lambda: not any(node.processes() for node in made.nodes), 10)
    for node in made.nodes:
        if processes := node.processes():
            outcome.problems.append(f"processes {processes} are left on {node.host}")
    outcome.after = newest(folder)
    said = started[0].text
    resumed = _RESUMED.search(said)
    if _TRAINED.search(said) and (int(resumed[1]) if resumed else 0) != outcome.before:
        outcome.problems.append(f"it went on from {resumed and resumed[1]}, and {outcome.before} was there")
    outcome.problems += [f"a traceback:\n{one.text[-2000:]}" for one in left if "Traceback" in one.text]


def unlike(folder: Path, expected: Mapping[int, float]) -> list[str]:
    """Steps of a finished run whose loss is not that of the run that was never disturbed."""
    found = losses(folder)
    apart = [step for step in expected if found.get(step) != expected[step]]
    return [f"another loss in steps {apart[:5]}"] if apart or found.keys() != expected.keys() else []
