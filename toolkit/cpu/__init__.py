"""The fast paths of ranks on a CPU, instead of torch's own operators and gloo's sockets.

Attention by blocks, RMSNorm by pieces, matmuls by reordered matrices, attention of one token, gathers through
shared memory and memory that malloc keeps. training.cpu_fast_paths turns them off together. No torch here.
"""

from __future__ import annotations

_enabled = True


def enable(fast: bool) -> bool:
    """Turn the fast paths on or off, as ``training.cpu_fast_paths`` says; return whether they were on."""
    global _enabled
    before, _enabled = _enabled, fast
    return before


def is_enabled() -> bool:
    """Return whether a CPU takes the fast paths."""
    return _enabled
