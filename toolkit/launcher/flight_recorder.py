"""torch's flight recorder: the last collectives of each rank, and the one in which it waits.

There are two recorders. NCCL's watchdog writes a pickled file at a timeout, for torch's analyzer
``torchfrtrace``. The other recorder covers all other backends, here gloo, but not transfers between two
ranks. This module writes both as JSON, next to NCCL's file.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.compat import process_groups, recorded_collectives
from toolkit.launcher.fault_reports import Place


def enable(entries: int, prefix: Path) -> None:
    """Record each rank's last ``entries`` collectives; 0 turns the recorder off.

    NCCL's watchdog writes to a file named by ``prefix`` and the rank. Affects process groups created
    afterwards.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(entries)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = str(int(entries > 0))
    if entries:
        if torch.cuda.is_available():  # the watchdog does not create folders
            prefix.parent.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(prefix)


def _traces() -> dict[str, dict[str, Any]]:
    """Return the traces of the recorders that have entries."""
    traces = {name: recorded_collectives(name) for name in ("gloo", "nccl")}
    return {name: trace for name, trace in traces.items() if trace.get("entries")}


def write(prefix: Path, rank: int) -> None:
    """Write this rank's recorded collectives to ``<prefix><rank>.json``, if there are any.

    Raises:
        OSError: the folder is not writable.
    """
    traces = _traces()
    if traces:
        path = prefix.with_name(f"{prefix.name}{rank}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(traces), encoding="utf-8")


def standing() -> tuple[tuple[Place, ...], Place | None, float]:
    """Return this rank's places in its groups of several ranks; the place of its oldest unfinished collective
    (or of the newest, if all are finished); and the seconds since the start of that collective."""
    entries = [
        entry | {"done": entry["state"] == "completed" or (name == "gloo" and entry["retired"])}
        for name, trace in _traces().items()
        for entry in trace["entries"]
    ]
    shown: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=_asked):
        group = entry["process_group"][0]
        # A finished collective implies that earlier ones are finished.
        if group not in shown or shown[group]["done"] or entry["done"]:
            shown[group] = entry
    groups = {group: (description, ranks) for group, description, ranks in _groups()}
    places = {group: _place(*groups[group], shown.get(group)) for group in groups}
    known = [entry for group, entry in shown.items() if group in groups]
    waiting = [entry for entry in known if not entry["done"]]
    if not known:
        return tuple(places.values()), None, 0.0
    entry = min(waiting, key=_asked) if waiting else max(known, key=_asked)
    seconds = (time.time_ns() - _asked(entry)) / 1e9
    return tuple(places.values()), places[entry["process_group"][0]], seconds


def _asked(entry: dict[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _groups() -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, description and global ranks of this rank's groups."""
    return [
        (group.group_name, group.group_desc, tuple(dist.get_process_group_ranks(group)))
        for group in process_groups()
        if group.size() > 1
    ]


def _place(description: str, ranks: tuple[int, ...], entry: dict[str, Any] | None) -> Place:
    if entry is None:
        return Place(description, ranks, done=True)
    number = 0 if entry["is_p2p"] else entry["collective_seq_id"]
    return Place(description, ranks, number, entry["profiling_name"].split(":")[-1], entry["done"])
