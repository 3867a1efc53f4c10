"""Signals that ask a run to save and stop: SIGTERM, SIGINT and SIGUSR1."""

from __future__ import annotations

import signal
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Notes the first signal; a second one acts as if nobody had listened.

    A rank may be signalled alone, so what is noted here is only this rank's wish: the ranks agree on
    it inside a step (see `toolkit.step`).
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._note) for number in ASKING}

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self.release()

    def release(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
