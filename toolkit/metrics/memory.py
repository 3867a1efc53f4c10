"""Measure this process's memory: on its CUDA device, or resident on the host."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

GIB = 2**30


def memory_usage(device: torch.device) -> dict[str, float]:
    """Return the memory in GiB under the keys of ``metrics.jsonl``.

    On CUDA, ``memory_gib`` and ``memory_reserved_gib`` are the peaks of allocated and reserved memory since
    the previous call; ``memory_retries`` and ``memory_ooms`` count the allocator's cache flushes and failures
    since the start. On CPU, ``memory_gib`` is the current resident memory, and ``memory_peak_gib`` its peak
    since the start.
    """
    if device.type != "cuda":
        now, peak = resident_bytes()
        return {"memory_gib": now / GIB, "memory_peak_gib": peak / GIB}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory_gib": stats["allocated_bytes.all.peak"] / GIB,
        "memory_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory_retries": stats["num_alloc_retries"],
        "memory_ooms": stats["num_ooms"],
    }


def resident_bytes() -> tuple[int, int]:
    """Return the current and the peak resident memory in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux: only the peak is available
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak, peak
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
