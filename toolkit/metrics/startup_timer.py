"""How long each part of the start-up took. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Phases:
    """Times named phases and prints a line for each as it ends, where ``enabled``.

    ::

        phases = Phases(enabled=rank == 0)
        with phases("tokenizer"):
            ...
    """

    def __init__(self, *, enabled: bool = True):
        self.enabled = enabled
        before = process_seconds()
        if before is not None:
            self._ended("interpreter and imports", before)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body; a phase that fails is not reported, its error is. Phases do not nest."""
        started = time.perf_counter()
        yield
        self._ended(name, time.perf_counter() - started)

    def _ended(self, name: str, seconds: float) -> None:
        if self.enabled:
            print(f"  {name:<24} {seconds:7.2f} s", flush=True)


def process_seconds() -> float | None:
    """Seconds since this process started, interpreter start and imports included; None off Linux."""
    try:
        # the command, field 2, may hold spaces and brackets: count from its end
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
