"""The loaders over the corpora of a run, from the configuration."""

from __future__ import annotations

from typing import Any

from toolkit.config import Config
from toolkit.data.batch_size import BatchShape
from toolkit.data.build import Data
from toolkit.data.loader import Loader, build_loader


def training_loader(
    config: Config, data: Data, shape: BatchShape, *, dp_rank: int, dp_size: int, seed: int
) -> Loader:
    """Endless micro-batches of this rank, each epoch in an order of its own."""
    return build_loader(
        data.train,
        seq_len=config.training.seq_len,
        global_batch_size=shape.total,
        local_batch_size=shape.local,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=seed,
        shuffle=config.data.shuffle,
        **_options(config, data),
        **config.training.dataloader.model_dump(),
    )


def validation_loader(config: Config, data: Data, *, dp_rank: int, dp_size: int) -> Loader | None:
    """The held-out corpus once, or its first ``validation.samples``, in its own order; None where there is
    no validation."""
    if data.validation is None:
        return None
    size, samples = config.validation.local_batch_size, config.validation.samples
    return build_loader(
        data.validation,
        seq_len=config.validation.seq_len,
        global_batch_size=size * dp_size,
        local_batch_size=size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=0,
        shuffle=False,
        infinite=False,
        at_most=None if samples == -1 else samples,
        **_options(config, data),
        **config.validation.dataloader.model_dump(),
    )


def _options(config: Config, data: Data) -> dict[str, Any]:
    """How both corpora become rows."""
    return {
        "packing": config.data.packing,
        "document_mask": config.data.document_mask,
        "pad_id": data.tokenizer.pad_id,
    }
