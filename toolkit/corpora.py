"""The tokenizer and the tokenised corpora of a run, from the configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config import Config
from toolkit.config.tables_training import Corpus, Training, Validation
from toolkit.data.cache import TokenCache, tokenized
from toolkit.data.mixture import Part
from toolkit.data.sources import open_source
from toolkit.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """A tokenizer and the corpora that it made into tokens; ``train`` is one, or the parts of a mixture."""

    tokenizer: Tokenizer
    train: TokenCache | tuple[Part, ...]
    validation: TokenCache | None


def open_data(config: Config, *, progress: bool, limit_gb: float | None = None) -> Data:
    """Load the tokenizer and open the token caches, building them where they are missing.

    No more than ``limit_gb`` gigabytes of text of a corpus are tokenised; None is data.max_inline_gb.

    The launcher calls this before it starts the ranks, where a progress bar has the terminal to itself;
    a rank calls it before it meets the others, so that a slow tokenisation is no collective's time-out.

    Raises:
        DataError: a corpus or the tokenizer is missing, empty or unreadable; a corpus that is not tokenised
            yet is larger than the limit.
    """
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_assets_path)

    def corpus(options: Training | Validation | Corpus, column: str | None = None) -> TokenCache:
        source = open_source(
            options.dataset,
            options.dataset_path,
            config.data.text_column if column is None else column,
            subset=options.dataset_subset,
            split=options.dataset_split,
        )
        return tokenized(
            source,
            tokenizer,
            cache_folder=config.data.cache_folder,
            progress=progress,
            max_inline_gb=config.data.max_inline_gb if limit_gb is None else limit_gb,
        )

    mixture = sorted(config.data.mixture.items())
    parts = tuple(Part(name, part.weight, corpus(part, part.text_column)) for name, part in mixture)
    validation = corpus(config.validation) if config.validation.enable else None
    return Data(tokenizer, parts or corpus(config.training), validation)
