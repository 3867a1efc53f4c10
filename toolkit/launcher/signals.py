"""Requests to save and stop, by SIGTERM, SIGINT, SIGUSR1, SIGHUP or the time limit. Imports no torch."""

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
"""Seconds after the first signal from which a SIGINT means that a user, not a scheduler, insists on
ending."""


def asking() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop; SIGHUP is not one under nohup."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*signals, signal.SIGHUP)


class Stopped(BaseException):
    """Raised when a signal requests a stop while there is nothing to save."""

    def __init__(self, signum: int):
        self.name = signal.Signals(signum).name


@contextmanager
def stop_at_once() -> Iterator[None]:
    """Raise :class:`Stopped` on the first signal that requests a stop, and ignore later ones."""

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
    """Records the first signal, or that ``deadline`` is near; the step in progress continues.

    A signal may reach a single rank, so this is only this rank's request: the ranks agree on it inside a step
    (see `toolkit.train_step`). Schedulers and launchers send a signal several times. Repeats are therefore
    ignored, except a SIGINT some seconds later, which comes from a user who does not want to wait.
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
        """Return the reason for the stop, as far as this rank knows it."""
        if self.signal:
            return self.signal.name
        return "its time limit" if self.deadline.near() else "a signal to another rank"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._since + INSISTING_SECONDS:
            raise KeyboardInterrupt

    def release(self) -> None:
        """Restore the previous signal handlers. If the run was asked to stop, repeated signals of the
        scheduler remain ignored while the run ends."""
        ending = self.asked
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ending and number != signal.SIGINT else handler)
