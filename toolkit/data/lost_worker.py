"""The error of a run that has lost a process which read its data."""

from __future__ import annotations

import re

from toolkit.errors import DataError


def lost_worker(error: RuntimeError) -> DataError | None:
    """Turn ``error`` into what the user is told, if it is torch's about a worker that has ended.

    torch raises it in whatever this process is at, as soon as the worker ends.
    """
    said = re.match(r"DataLoader worker \(pid.*?\) [^.]*", str(error))
    return lost(said[0]) if said else None


def lost(what: str) -> DataError:
    """The error in which ``what`` is told."""
    return DataError(
        f"{what}: it was killed, or memory ran out (see dmesg)\n"
        "  fix:  lower training.dataloader.num_workers or prefetch_factor; the same command goes on from the "
        "newest checkpoint"
    )
