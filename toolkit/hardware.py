"""Detect the hardware of this machine without importing torch, so that checks stay fast. Peak rates are in
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
    """Cores that this process may use, which a job or a container can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> dict[str, list[str]]:
    """The words that Linux has for a processor, by their names in /proc/cpuinfo; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for it; without them bfloat16 is slower than float32."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(processor().get("flags", []))


def lacks_cpp_compiler() -> str | None:
    """The rule that is broken where torch's inductor cannot compile code for a CPU, or None."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return None
    return f"inductor writes C++ for the CPU, and there is no compiler {compiler} here"


def lacks_c_compiler() -> str | None:
    """The rule that is broken where Triton, which compiles for GPUs, cannot build its launchers, or None."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if any(map(shutil.which, compilers)):
        return None
    return f"Triton compiles C for what it launches on a GPU, and there is no {' or '.join(compilers)} here"


@dataclass(frozen=True)
class Hardware:
    """Accelerators of a machine, or its CPU.

    Attributes:
        device: "cuda" or "cpu".
        count: processes that a launch starts by default.
        capability: lowest CUDA compute capability, 0 on a CPU.
        memory: bytes of the smallest GPU, 0 on a CPU.
    """

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
        rows = _select_gpus(rows, visible.split(","))
    return [(row[2], float(row[3]), int(row[4]) << 20 if row[4].isdigit() else 0) for row in rows]


def _select_gpus(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """The GPUs with these indices or UUID prefixes, up to the first that matches none, as CUDA does."""
    found: list[list[str]] = []
    for name in map(str.strip, names):
        matches = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if len(matches) != 1:
            break
        found += matches
    return found


_simulated: str | None = None


@contextmanager
def simulate(device: str) -> Iterator[None]:
    """Let fake tensors on the CPU stand for tensors on the device type ``device``."""
    global _simulated
    before, _simulated = _simulated, device
    try:
        yield
    finally:
        _simulated = before


def is_simulated() -> bool:
    """Report whether tensors are fake and stand for those of :func:`simulate`."""
    return _simulated is not None


def cached_tensors(function: Callable[..., R]) -> Callable[..., R]:
    """Cache the last 16 results of a function that makes tensors, but none while tensors are simulated: those
    are fake, and what is read from them is arbitrary."""
    cached = functools.lru_cache(maxsize=16)(function)

    @functools.wraps(function)
    def call(*args: Any) -> R:
        return (function if is_simulated() else cached)(*args)

    return call


def device_type(actual: str) -> str:
    """The simulated device type, else the ``actual`` one."""
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
