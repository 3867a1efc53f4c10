"""Fast paths for ranks on a CPU, instead of torch's own operators and gloo's sockets.

The fast paths are blockwise attention, chunked RMSNorm, linear layers by oneDNN, matmuls with prepacked
weights, single-token attention, collectives through shared memory, and retention of freed memory in malloc.
training.cpu_fast_paths = false disables them all. Imports no torch.
"""

from __future__ import annotations

_enabled = True


def enable(fast: bool) -> bool:
    """Enable or disable the fast paths (``training.cpu_fast_paths``); return whether they were enabled."""
    global _enabled
    before, _enabled = _enabled, fast
    return before


def is_enabled() -> bool:
    """Return whether the CPU fast paths are enabled."""
    return _enabled
