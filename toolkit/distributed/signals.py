"""Signals that ask a run to save and stop: SIGTERM, SIGINT and SIGUSR1."""

from __future__ import annotations

import signal
import time
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INSISTING_SECONDS = 2.0


class StopRequest:
    """Notes the first signal and lets the step in progress end.

    A rank may be signalled alone, so this is only this rank's wish: the ranks agree on it inside a step
    (see `toolkit.step`). Schedulers and launchers repeat themselves, so a further signal changes
    nothing, save a SIGINT seconds later: that is a person at a keyboard who does not want to wait.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._before = {number: signal.signal(number, self._note) for number in ASKING}

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._since + INSISTING_SECONDS:
            raise KeyboardInterrupt

    def release(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
