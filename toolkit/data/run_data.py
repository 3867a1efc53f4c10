"""Data prepared by the launcher for the ranks of a run. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.data.token_files import MixturePart, TokenCache, open_cache
from toolkit.errors import DataError

TOKENS = "TOOLKIT_TOKENS"
"""Environment variable in which a launcher passes the run's data, as text, to its ranks."""

BASE_CORPUS = "validation.base_corpus"
"""Config table of the plain text on which forgetting is measured."""


@dataclass(frozen=True)
class RunData:
    """The tokenized corpora of a run.

    Attributes:
        n_words: Number of tokens in the tokenizer's vocabulary.
        pad_id: The tokenizer's padding token, or None.
        caches: Corpora by the names of their config tables.
    """

    n_words: int
    pad_id: int | None
    caches: Mapping[str, TokenCache]

    @property
    def weighted(self) -> bool:
        """True if a corpus has loss weights."""
        return any(cache.weights is not None for cache in self.caches.values())

    def train(self, config: Config) -> TokenCache | tuple[MixturePart, ...]:
        """Return the training corpus, or the corpora of its mixture."""
        parts = config.data.weights.items()
        return (
            tuple(MixturePart(name, weight, self.caches[f"data.mixture.{name}"]) for name, weight in parts)
            or self.caches["training"]
        )

    def text(self) -> str:
        """Serialize the data for :func:`from_text`, which reopens it on this machine."""
        folders = {table: str(cache.folder) for table, cache in self.caches.items()}
        return json.dumps({"n_words": self.n_words, "pad_id": self.pad_id, "caches": folders})


def from_text(text: str) -> RunData:
    """Open data serialized by :meth:`RunData.text`.

    Raises:
            DataError: A cache has since been removed or damaged.
    """
    values = json.loads(text)
    try:
        caches = {table: open_cache(expand_user(folder)) for table, folder in values["caches"].items()}
    except OSError as error:
        raise DataError(
            f"the tokens that the launcher has prepared cannot be read: {error}\n  fix:  start again"
        ) from error
    return RunData(values["n_words"], values["pad_id"], caches)
