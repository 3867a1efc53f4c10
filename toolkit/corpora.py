"""The tokenizer and the tokenised corpora of a run, from the configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import Config
from toolkit.data.cache import TokenCache, tokenized
from toolkit.data.sources import open_source
from toolkit.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """A tokenizer and the corpora that it made into tokens."""

    tokenizer: Tokenizer
    train: TokenCache
    validation: TokenCache | None


def open_data(config: Config, *, progress: bool) -> Data:
    """Load the tokenizer and open the token caches, building them where they are missing.

    The launcher calls this before it starts the ranks, where a progress bar has the terminal to itself;
    a rank calls it before it meets the others, so that a slow tokenisation is no collective's time-out.

    Raises:
        DataError: a corpus or the tokenizer is missing, empty or unreadable.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_assets_path)

    def corpus(dataset: str, path: str | None) -> TokenCache:
        source = open_source(dataset, path, config.data.text_column)
        return tokenized(source, tokenizer, cache_folder=config.data.cache_folder, progress=progress)

    train = corpus(config.training.dataset, config.training.dataset_path)
    held_out = config.validation
    validation = corpus(held_out.dataset, held_out.dataset_path) if held_out.enable else None
    return Data(tokenizer, train, validation)
