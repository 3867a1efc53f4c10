"""Heartbeat file with the time and state of a run, for external watchdogs."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.step_hooks import StepHook, StepResult

_STEP_STATES = ("data", "profiler")


class Heartbeat(StepHook):
    """Writes ``path`` atomically, at most every ``seconds`` unless the state changes. States that occur in
    every step (waiting for data, and the profiler) are written only if the last write was ``seconds`` ago.

    The file is a JSON object with ``time`` (Unix seconds), ``step`` (the last finished), ``state``, ``rank``,
    ``host`` and ``pid``. Write errors are ignored: the file then becomes outdated, which a watchdog detects.
    """

    def __init__(
        self, path: Path, *, seconds: float, rank: int, step: Callable[[], int], end: Callable[[], str]
    ):
        self.path, self.seconds, self.step, self.end = path, seconds, step, end
        self.about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._state, self._written = "", 0.0
        self._done = step()

    def beat(self, state: str) -> None:
        now = time.time()
        if state in (self._state, *_STEP_STATES) and 0 <= now - self._written < self.seconds:
            return
        self._state, self._written = state, now
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            step = min(self.step(), self._done)  # step() includes the step in progress
            temporary.write_text(json.dumps({"time": now, "step": step, "state": state, **self.about}))
            temporary.replace(self.path)

    def after_step(self, step: int, result: StepResult) -> None:
        self._done = self.step()
        self.beat("training")

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        before = self._state
        self.beat(name)
        yield
        self.beat(before)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.beat("failed" if kind else self.end())
