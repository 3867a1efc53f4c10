"""Random seeds as a function of (seed, step, rank), so that no generator state needs to be saved."""

from __future__ import annotations

import hashlib
import os

import torch


def seed_step(seed: int, step: int, data_rank: int) -> None:
    """Seed torch's generators for one step, so that a resumed run draws the same values.

    Ranks that read the same samples (tensor- or pipeline-parallel peers) pass the same ``data_rank``.
    """
    torch.manual_seed(derived_seed(seed, step, data_rank))


def derived_seed(*parts: int) -> int:
    """Return a seed that is a stable hash of ``parts``."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """Enable deterministic kernels: slower on CUDA, but bitwise reproducible."""
    if not enabled:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
