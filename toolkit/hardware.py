"""Detect this machine's hardware without importing torch, so that checks stay fast. Peak rates are in
``metrics/flops.py``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")


def cores() -> int:
    """Number of CPU cores available to this process (its CPU affinity, where the OS reports it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> dict[str, list[str]]:
    """Return the fields of /proc/cpuinfo for a processor, as lists of words; empty outside Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has bfloat16 instructions; without them bfloat16 is slower than float32."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(processor().get("flags", []))


def lacks_cpp_compiler() -> str | None:
    """Return why torch's inductor cannot compile code for the CPU, or None if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return None
    return f"inductor writes C++ for the CPU, and there is no compiler {compiler} here"


def lacks_c_compiler() -> str | None:
    """Return why Triton, the GPU compiler, cannot build its launchers, or None if it can."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if any(map(shutil.which, compilers)):
        return None
    return f"Triton compiles C for what it launches on a GPU, and there is no {' or '.join(compilers)} here"


@dataclass(frozen=True)
class Hardware:
    """The accelerators of a machine, or its CPU.

    Attributes:
        device: "cuda" or "cpu".
        count: default number of processes of a launch.
        capability: lowest CUDA compute capability, 0 on a CPU.
        memory: bytes of the smallest GPU's memory, 0 on a CPU.
    """

    device: str
    name: str
    count: int
    native_bf16: bool
    capability: float = 0.0
    memory: int = 0


def _visible_gpus() -> list[tuple[str, float, int]]:
    """Return (name, compute capability, bytes of memory) of each GPU visible under CUDA_VISIBLE_DEVICES."""
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
        rows = _select_gpus(rows, visible.split(","))
    return [(row[2], float(row[3]), int(row[4]) << 20 if row[4].isdigit() else 0) for row in rows]


def _select_gpus(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """Select GPUs by index or UUID prefix; like CUDA, stop at the first name that matches none."""
    found: list[list[str]] = []
    for name in map(str.strip, names):
        matches = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if len(matches) != 1:
            break
        found += matches
    return found


_simulated: str | None = None
_expert_load = 1.0


@contextmanager
def simulate(device: str, *, expert_load: float = 1.0) -> Iterator[None]:
    """Make fake tensors on the CPU represent tensors on the device type ``device``. The experts of a rank
    receive ``expert_load`` times the mean number of rows in their group."""
    global _simulated, _expert_load
    before = _simulated, _expert_load
    _simulated, _expert_load = device, expert_load
    try:
        yield
    finally:
        _simulated, _expert_load = before


def is_simulated() -> bool:
    """Report whether tensors are fake, inside :func:`simulate`."""
    return _simulated is not None


def simulated_expert_load() -> float:
    """Return the load of this rank's experts inside :func:`simulate`, divided by the mean."""
    return _expert_load


def cached_tensors(function: Callable[..., R]) -> Callable[..., R]:
    """Cache the last 16 results of a function that creates tensors. Simulated tensors are not cached: they
    are fake, and values read from them are arbitrary."""
    cached = functools.lru_cache(maxsize=16)(function)

    @functools.wraps(function)
    def call(*args: Any) -> R:
        return (function if is_simulated() else cached)(*args)

    return call


def device_type(actual: str) -> str:
    """Return the simulated device type, or ``actual`` if none is simulated."""
    return _simulated or actual


@functools.cache  # nvidia-smi takes from a tenth of a second to a few seconds
def detect(device: str = "auto") -> Hardware:
    """Detect the accelerators of this machine, or its CPU if there are none or ``device`` is "cpu".

    The CPU default is two processes: enough to exercise sharding on a laptop.
    """
    gpus = [] if device == "cpu" else _visible_gpus()
    if gpus:
        capability, memory = min(it[1] for it in gpus), min(it[2] for it in gpus)
        native = capability >= 8.0
        return Hardware("cuda", gpus[0][0], len(gpus), native, capability=capability, memory=memory)
    return Hardware("cpu", "CPU", 2, native_bf16=cpu_multiplies_bf16())
