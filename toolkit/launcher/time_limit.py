"""The wall time of a run: what the user allows, and when the scheduler will end the job. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, from Slurm 22.05
RESERVE = 60.0
"""Seconds in which a run must be able to save and end, before any step has shown what it needs."""


class Deadline:
    """The earlier of ``minutes`` after now and the end of a Slurm job; without either, never.

    ``clock`` never goes backwards, as the ``time_of_day`` that Slurm speaks of may.
    """

    def __init__(
        self,
        minutes: float | None,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ):
        self._clock = clock
        limit = 60 * minutes if minutes else math.inf
        scheduled = environ.get(SLURM_END, "")
        left = float(scheduled) - time_of_day() if scheduled.isdecimal() else math.inf
        self._last = clock()
        self._end = self._last + min(limit, left)
        self._reserve = min(RESERVE, limit / 10)
        self._longest = 0.0

    def begin(self) -> None:
        """Begin the first lap: what a run does before, once, is none."""
        self._last = self._clock()

    def lap(self) -> None:
        """Note the end of a step with all that followed it, saving and validation too."""
        now = self._clock()
        self._last, self._longest = now, max(self._longest, now - self._last)

    def near(self) -> bool:
        """Return whether another lap and a save, allowed twice the longest so far, might end too late."""
        return self._clock() + 2 * self._longest + self._reserve > self._end
