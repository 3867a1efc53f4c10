"""The processors of this machine, and the memory of a process that computes on them. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h


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
    """Say if this CPU has instructions for it; without them bfloat16 is slower than float32."""
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


def keep_freed_memory() -> bool:
    """Have malloc keep the memory of freed tensors for those to come: glibc gives that of large ones back,
    and each page that is mapped anew costs a fault.

    False, and nothing is changed, where the environment says what malloc is to do (MALLOC_TRIM_THRESHOLD_ and
    its like, GLIBC_TUNABLES) or it is not glibc's.
    """
    told = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or told or "GLIBC_TUNABLES" in os.environ:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
