"""torch's flight recorder: the last collectives of each rank, written down when one of them fails.

There are two of them: one of NCCL, whose watchdog itself writes a pickled file at a time-out (for torch's
analyser, ``torchfrtrace``), and one of all other back ends, gloo's here. What this module writes is JSON
of both, beside that file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


def enable(entries: int, prefix: Path) -> None:
    """Have each rank remember its last ``entries`` collectives; 0 turns the recorder off.

    ``prefix`` and the rank name the file that NCCL's watchdog writes. Acts on process groups that are
    formed afterwards.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(entries)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = str(int(entries > 0))
    if entries:
        if torch.cuda.is_available():  # the watchdog makes no folder
            prefix.parent.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(prefix)


def write(prefix: Path, rank: int) -> str:
    """Write ``<prefix><rank>.json``, the collectives that this rank asked for; returns what to tell of it.

    An empty string where nothing was recorded.
    """
    traces = _traces()
    if not traces:
        return ""
    path = prefix.with_name(f"{prefix.name}{rank}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(traces, indent=1), encoding="utf-8")
        where = f"its last ones are in {path}"
    except OSError as error:
        where = f"its last ones cannot be written to {path}: {error}"
    told = [f"rank {rank}: {_stuck(name, trace['entries'])}" for name, trace in traces.items()]
    return "\n".join([*told, f"  {where}; compare them with those of the other ranks"])


def _traces() -> dict[str, dict[str, Any]]:
    from torch._C import _distributed_c10d

    traces = {}
    for name, function in _RECORDERS.items():
        dump = getattr(_distributed_c10d, function, None)  # NCCL's is not in builds without it
        trace = json.loads(dump()) if dump else {}
        if trace.get("entries"):
            traces[name] = trace
    return traces


def _stuck(name: str, entries: list[dict[str, Any]]) -> str:
    """The collective that others are waited for, as far as one can know: gloo's never count as completed."""
    waiting = [entry for entry in entries if entry["state"] != "completed"]
    if name == "nccl" and waiting:
        return f"the first collective that did not complete was {_describe(waiting[0])}"
    return f"the last collective of {name} that was asked for was {_describe(entries[-1])}"


def _describe(entry: dict[str, Any]) -> str:
    group = entry["process_group"][-1]
    sizes, number = entry["input_sizes"], entry["collective_seq_id"]
    return f"{entry['profiling_name']} of {sizes}, number {number} of the group {group!r}"
