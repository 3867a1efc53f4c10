"""Memory of a process that trains on a CPU. Imports no torch."""

from __future__ import annotations

import ctypes
import os

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # constants of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Make malloc keep the memory of freed tensors for reuse: glibc returns large allocations to the system,
    and mapping a page again costs a page fault.

    Returns False and changes nothing if the environment configures malloc (MALLOC_TRIM_THRESHOLD_ and similar
    variables, GLIBC_TUNABLES), or if malloc is not glibc's.
    """
    told = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or told or "GLIBC_TUNABLES" in os.environ:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
