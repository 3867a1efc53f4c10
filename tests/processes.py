"""The processes of a Linux, by /proc."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started and not yet reaped."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def runs(pid: int) -> bool:
    """Say if there is such a process, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
