"""Memory of a process that trains on a CPU. Imports no torch."""

from __future__ import annotations

import ctypes
import os

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have malloc keep the memory of freed tensors for those to come: glibc gives that of large ones back,
    and each page that is mapped again costs a fault.

    False, and nothing is changed, where the environment says what malloc is to do (MALLOC_TRIM_THRESHOLD_ and
    its like, GLIBC_TUNABLES) or it is not glibc's.
    """
    told = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or told or "GLIBC_TUNABLES" in os.environ:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
