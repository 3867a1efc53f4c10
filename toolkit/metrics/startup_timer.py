"""Time the phases of startup. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StartupTimer:
    """Times named phases and, if ``enabled``, prints a line when each ends.

    ::

        timer = StartupTimer(enabled=rank == 0)
        with timer("tokenizer"):
            ...
    """

    def __init__(self, *, enabled: bool = True):
        self.enabled = enabled
        before = process_seconds()
        if before is not None:
            self._report("interpreter and imports", before)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase, inside the context. A phase that raises is not reported. Phases do not nest."""
        started = time.perf_counter()
        yield
        self._report(name, time.perf_counter() - started)

    def _report(self, name: str, seconds: float) -> None:
        if self.enabled:
            print(f"  {name:<24} {seconds:7.2f} s", flush=True)


def process_seconds() -> float | None:
    """Return the seconds since this process started, including interpreter startup and imports; None outside
    Linux."""
    try:
        # the command, field 2, may contain spaces and brackets: count from its end
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
