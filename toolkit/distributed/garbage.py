"""Python's garbage collector, moved to the same step on every rank."""

from __future__ import annotations

import gc


class GarbageCollection:
    """Collect every ``every`` steps instead of whenever Python likes.

    Ranks that pause at different moments make all the others wait at the next collective.
    """

    def __init__(self, every: int, *, debug: bool = False):
        self.every = every
        if debug:
            gc.set_debug(gc.DEBUG_STATS)
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            gc.collect(generation=1)
