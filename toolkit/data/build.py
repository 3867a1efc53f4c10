"""The tokenizer and the tokenised corpora of a run, from the configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.config import Config
from toolkit.config.corpora import corpora
from toolkit.data.cache import Part, TokenCache, tokenized
from toolkit.data.sources import open_source
from toolkit.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Data:
    """A tokenizer and the corpora that it made into tokens; ``train`` is one, or the parts of a mixture."""

    tokenizer: Tokenizer
    train: TokenCache | tuple[Part, ...]
    validation: TokenCache | None


def open_data(config: Config, *, progress: bool) -> Data:
    """Load the tokenizer and open the token caches, building them where they are missing.

    The launcher calls this before it starts the ranks, where a progress bar has the terminal to itself;
    a rank calls it before it meets the others, so that a slow tokenisation is no collective's time-out.

    Raises:
        DataError: a corpus or the tokenizer is missing, empty or unreadable; a corpus that is not tokenised
            yet is larger than data.max_inline_gb.
    """
    tokenizer = run_tokenizer(config)
    limit = config.data.max_inline_gb
    caches = dict(open_corpora(config, tokenizer, progress=progress, max_inline_gb=limit))
    mixture = sorted(config.data.mixture.items())
    parts = tuple(Part(name, part.weight, caches[f"data.mixture.{name}"]) for name, part in mixture)
    return Data(tokenizer, parts or caches["training"], caches.get("validation"))


def run_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the model."""
    options = config.model
    return load_tokenizer(options.tokenizer_path or options.hf_assets_path, add_bos=options.add_bos_token)


def open_corpora(
    config: Config,
    tokenizer: Tokenizer,
    *,
    progress: bool,
    max_inline_gb: float,
    processes: int = 0,
    verify: bool = False,
) -> Iterator[tuple[str, TokenCache]]:
    """Each corpus of the run under the name of its table in the config, one after the other.

    For the rest see :func:`toolkit.data.cache.tokenized`.

    Raises:
        DataError: as :func:`open_data`.
    """
    for corpus in corpora(config):
        cache = tokenized(
            open_source(**corpus.arguments()),
            tokenizer,
            cache_folder=config.data.cache_folder,
            progress=progress,
            processes=processes,
            max_inline_gb=max_inline_gb,
            verify=verify,
        )
        yield corpus.table, cache
