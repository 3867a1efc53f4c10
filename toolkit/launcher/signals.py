"""Requests to save and stop: SIGTERM, SIGINT, SIGUSR1, SIGHUP, and a run's wall time. Imports no torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.launcher.time_limit import Deadline

INSISTING_SECONDS = 2.0
"""A SIGINT so long after the first signal is of a person who does not want to wait, not of a scheduler."""


def asking() -> tuple[signal.Signals, ...]:
    """The signals that ask to stop; a hang-up is none under nohup."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*signals, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked to stop where nothing is to be saved."""

    def __init__(self, signum: int):
        self.name = signal.Signals(signum).name


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Raise :class:`Stopped` at the first signal that asks to stop; the next ones change nothing."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(signum)

    before = {number: signal.getsignal(number) for number in asking()}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Notes the first signal, or that ``deadline`` is near, and lets the step in progress end.

    A rank may be signalled alone, so this is only this rank's wish: the ranks agree on it inside a step
    (see `toolkit.train_step`). Schedulers and launchers send a signal several times, so repeats are
    ignored, except a SIGINT some seconds later: it comes from a user who does not want to wait.
    """

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._before = {number: signal.signal(number, self._note) for number in asking()}

    @property
    def asked(self) -> bool:
        return self.signal is not None or self.deadline.near()

    @property
    def reason(self) -> str:
        """Return the cause of the stop, as far as this rank knows."""
        if self.signal:
            return self.signal.name
        return "its time limit" if self.deadline.near() else "a signal to another rank"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._since + INSISTING_SECONDS:
            raise KeyboardInterrupt

    def release(self) -> None:
        """Give the signals back to whoever handled them before; while a run that was asked to stop ends,
        those of a scheduler that repeats itself still change nothing."""
        ending = self.asked
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ending and number != signal.SIGINT else handler)
