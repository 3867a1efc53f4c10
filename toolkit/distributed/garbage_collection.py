"""Python's garbage collector, moved to the same step on every rank."""

from __future__ import annotations

import gc

import torch

from toolkit import compat


class GarbageCollection:
    """Collect every ``every`` steps instead of whenever Python likes.

    Ranks that pause at different moments make all the others wait at the next collective. ``debug``
    collects after each step and, on CUDA, has torch warn of reference cycles that hold its memory.
    """

    def __init__(self, every: int, *, debug: bool = False):
        self.every = 1 if debug else every
        if debug and torch.cuda.is_available():
            compat.warn_tensor_cycles()
        gc.collect()
        # What start-up made stays: no later collection needs to look at it.
        gc.freeze()
        gc.disable()

    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            gc.collect()
