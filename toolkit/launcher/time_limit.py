"""The time limit of a run: the user's setting, and the end of the scheduler's job. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, since Slurm 22.05
RESERVE = 60.0
"""Seconds that a run needs to save and exit, assumed before any step has been measured."""


class Deadline:
    """The earlier of ``minutes`` from now and the end of the Slurm job; never, without either.

    ``clock`` is monotonic; ``time_of_day``, the clock of Slurm's end time, may not be.
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
        """Begin the first lap, which excludes the run's one-time setup."""
        self._last = self._clock()

    def lap(self) -> None:
        """Record the end of a step, including saving and validation after it."""
        now = self._clock()
        self._last, self._longest = now, max(self._longest, now - self._last)

    def near(self) -> bool:
        """Return whether another lap and a save might end too late, allowing twice the longest lap so far."""
        return self._clock() + 2 * self._longest + self._reserve > self._end
