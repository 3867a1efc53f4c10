"""What a run reads: tokenizer, token caches and the loaders over them, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.config import Config
from toolkit.config.layout import BatchShape
from toolkit.data.cache import TokenCache, tokenized
from toolkit.data.loader import Loader, build_loader
from toolkit.data.sources import open_source
from toolkit.data.tokenizer import Tokenizer, load_tokenizer
from toolkit.metrics.phases import Phases


@dataclass(frozen=True)
class Data:
    """A tokenizer and the corpora that it made into tokens."""

    tokenizer: Tokenizer
    train: TokenCache
    validation: TokenCache | None


def open_data(config: Config, phases: Phases) -> Data:
    """Load the tokenizer and open the token caches, building them where they are missing.

    Called before a rank meets the others, so that a slow tokenisation is no collective's time-out.

    Raises:
        DataError: a corpus or the tokenizer is missing, empty or unreadable.
    """
    chief = phases.enabled
    with phases("tokenizer"):
        tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_assets_path)

    def corpus(dataset: str, path: str | None) -> TokenCache:
        source = open_source(dataset, path, config.data.text_column)
        return tokenized(source, tokenizer, cache_folder=config.data.cache_folder, progress=chief)

    with phases("token cache"):
        train = corpus(config.training.dataset, config.training.dataset_path)
        held_out = config.validation
        validation = corpus(held_out.dataset, held_out.dataset_path) if held_out.enable else None
    return Data(tokenizer, train, validation)


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
    """The held-out corpus once, in its own order; None where there is no validation."""
    if data.validation is None:
        return None
    size = config.validation.local_batch_size
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
