"""Data that the ranks of a run train on, which their launcher has prepared. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.data.token_files import MixturePart, TokenCache, open_cache
from toolkit.errors import DataError

TOKENS = "TOOLKIT_TOKENS"
"""Set by a launcher for its ranks: the text of the run's data, by which they open the same."""

BASE_CORPUS = "validation.base_corpus"
"""The table of the plain text by which forgetting is measured."""


@dataclass(frozen=True)
class RunData:
    """The corpora of a run as tokens.

    Attributes:
        n_words: entries of the tokenizer.
        pad_id: its padding token, if it has one.
        caches: each corpus under the name of its table in the config.
    """

    n_words: int
    pad_id: int | None
    caches: Mapping[str, TokenCache]

    @property
    def weighted(self) -> bool:
        """Say if tokens of some corpus have weights in the loss."""
        return any(cache.weights is not None for cache in self.caches.values())

    def train(self, config: Config) -> TokenCache | tuple[MixturePart, ...]:
        """The corpus of the training, or the parts of its mixture."""
        parts = sorted(config.data.mixture.items())
        return (
            tuple(MixturePart(name, part.weight, self.caches[f"data.mixture.{name}"]) for name, part in parts)
            or self.caches["training"]
        )

    def text(self) -> str:
        """The data in words, from which :func:`from_text` opens it again on this machine."""
        folders = {table: str(cache.folder) for table, cache in self.caches.items()}
        return json.dumps({"n_words": self.n_words, "pad_id": self.pad_id, "caches": folders})


def from_text(text: str) -> RunData:
    """Open the data of which :meth:`RunData.text` tells.

    Raises:
        DataError: a cache has been removed or damaged since.
    """
    told = json.loads(text)
    try:
        caches = {table: open_cache(expand_user(folder)) for table, folder in told["caches"].items()}
    except OSError as error:
        raise DataError(
            f"the tokens that the launcher has prepared cannot be read: {error}\n  fix:  start again"
        ) from error
    return RunData(told["n_words"], told["pad_id"], caches)
