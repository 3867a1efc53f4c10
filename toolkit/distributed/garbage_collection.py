"""Synchronized garbage collection."""

from __future__ import annotations

import gc

import torch

from toolkit import compat


class GarbageCollection:
    """Collects garbage every ``every`` steps on all ranks, instead of when Python decides.

    A rank that pauses alone delays all others at the next collective. ``debug`` collects after each step and,
    on CUDA, makes torch warn about reference cycles that keep CUDA memory allocated.
    """

    def __init__(self, every: int, *, debug: bool = False):
        self.every = 1 if debug else every
        if debug and torch.cuda.is_available():
            compat.warn_tensor_cycles()
        gc.collect()
        gc.freeze()  # excludes the objects created at startup from later collections
        gc.disable()

    def after_step(self, step: int) -> None:
        if step % self.every == 0:
            gc.collect()
