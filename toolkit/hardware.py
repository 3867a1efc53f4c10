"""Hardware of this machine, found without importing torch so that checks stay fast."""

from __future__ import annotations

import functools
import os
import subprocess
from dataclasses import dataclass

from toolkit.cpu import cpu_multiplies_bf16


@dataclass(frozen=True)
class Hardware:
    """``device`` is "cuda" or "cpu"; ``count`` the processes that a launch starts by default;
    ``capability`` the compute capability of CUDA and ``memory`` the bytes of the smallest GPU, 0 without."""

    device: str
    name: str
    count: int
    native_bf16: bool
    capability: float = 0.0
    memory: int = 0


def _visible_gpus() -> list[tuple[str, float, int]]:
    """(name, compute capability, bytes) of each GPU that CUDA_VISIBLE_DEVICES leaves visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name,compute_cap,memory.total",
             "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    if visible is not None:
        rows = _named(rows, visible.split(","))
    return [(row[2], float(row[3]), int(row[4]) << 20 if row[4].isdigit() else 0) for row in rows]


def _named(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """The GPUs of which ``names`` are the indices, or beginnings of the UUIDs, up to the first that names
    none: CUDA does not look further."""
    found: list[list[str]] = []
    for name in map(str.strip, names):
        meant = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if len(meant) != 1:
            break
        found += meant
    return found


@functools.cache  # a call of nvidia-smi takes from a tenth of a second to some seconds
def detect(wish: str = "auto") -> Hardware:
    """Describe the accelerators here, or the CPU where there is none or the ``wish`` is "cpu".

    Two CPU processes by default: enough to exercise sharding, and what a laptop can spare.
    """
    gpus = [] if wish == "cpu" else _visible_gpus()
    if gpus:
        capability, memory = min(it[1] for it in gpus), min(it[2] for it in gpus)
        native = capability >= 8.0
        return Hardware("cuda", gpus[0][0], len(gpus), native, capability=capability, memory=memory)
    return Hardware("cpu", "CPU", 2, native_bf16=cpu_multiplies_bf16())
