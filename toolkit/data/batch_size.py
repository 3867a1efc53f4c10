"""Division of a global batch over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.training import Training
from toolkit.errors import divisors


@dataclass(frozen=True)
class BatchShape:
    """Sizes in samples: ``total`` per step and ``local`` per micro-batch, ``accumulation`` of them per
    rank."""

    total: int
    local: int
    accumulation: int


def batch_shape(training: Training, *, dp: int) -> BatchShape | None:
    """Divide a global batch over ``dp`` ranks; return None if it is not divisible.

    A ``global_batch_size`` of −1 means one micro-batch per rank. ``local_batch_size`` is the number of
    samples that fit on a device, and therefore an upper bound: the micro-batch is the largest divisor of a
    rank's samples up to that bound. The same TOML therefore gives the same run on more ranks than intended.
    """
    global_batch_size, most = training.global_batch_size, training.local_batch_size
    if global_batch_size == -1:
        return BatchShape(most * dp, most, 1)
    if global_batch_size % dp:
        return None
    rows = global_batch_size // dp
    local = max(size for size in divisors(rows) if size <= most)
    return BatchShape(global_batch_size, local, rows // local)


def n_shards(files: int, global_batch_size: int) -> int:
    """Return the number of shards of a stream: the largest divisor of the global batch up to ``files``."""
    return max(n for n in range(1, min(files, global_batch_size) + 1) if global_batch_size % n == 0)
