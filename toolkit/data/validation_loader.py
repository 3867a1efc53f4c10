"""Batches of a held-out corpus."""

from __future__ import annotations

from toolkit.config import Config
from toolkit.data.batch_size import BatchShape
from toolkit.data.dataloader import Loader, build_loader
from toolkit.data.run_data import RunData


def validation_loader(
    config: Config, data: RunData, *, dp_rank: int, dp_size: int, table: str = "validation"
) -> Loader | None:
    """The micro-batches of this rank of the held-out corpus of ``table``; None where there is none."""
    if table not in data.caches:
        return None
    size = config.validation.local_batch_size
    return build_loader(
        data.caches[table], config.validation, config.data, BatchShape(size * dp_size, size, 1),
        pad_id=data.pad_id, dp_rank=dp_rank, dp_size=dp_size,
    )  # fmt: skip
