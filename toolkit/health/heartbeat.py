"""The heartbeat of a run: a file that tells a watchdog outside of it when it was last seen doing what."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.step_hooks import StepHook, StepResult

_OF_EACH_STEP = ("data", "profiler")


class Heartbeat(StepHook):
    """Writes ``path`` as a whole, at most every ``seconds`` unless the state has changed. The wait for data,
    which each step begins with, and the profiler's part, which ends it, are such states where they begin
    ``seconds`` after the last one was written.

    One JSON object: ``time`` (Unix seconds), ``step`` (the last that is done), ``state``, ``rank``, ``host``
    and ``pid``. A file that cannot be written is left as it is: it is old then, which is what a watchdog
    looks for.
    """

    def __init__(
        self,
        path: Path,
        *,
        seconds: float,
        rank: int,
        step: Callable[[], int],
        finished: Callable[[], bool],
    ):
        self.path, self.seconds, self.step, self.finished = path, seconds, step, finished
        self.about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._state, self._written = "", 0.0
        self._done = step()

    def beat(self, state: str) -> None:
        now = time.time()
        if state in (self._state, *_OF_EACH_STEP) and 0 <= now - self._written < self.seconds:
            return
        self._state, self._written = state, now
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            step = min(self.step(), self._done)  # the run counts the step in progress too
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
        self.beat("failed" if kind else "finished" if self.finished() else "stopped")
