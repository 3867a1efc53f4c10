"""The form of a family's tiktoken files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_N_CL100K_RANKS = 100_256  # GPT-4's: they would pass for a trained file, and have other special tokens


@dataclass(frozen=True)
class TiktokenForm:
    """All that a tiktoken file leaves to the program that reads it, for files of ``n_ranks`` ranks.

    Attributes:
        called: the models with this form, in messages.
        pattern: how text is cut into words before bytes are merged.
        n_special: how many special tokens follow the ranks.
        special_tokens: their names in the order of ids, for the folder of the model files that the tokenizer
            is of; None for one that is of no published model.
        trained: the files that tools/train_tokenizer writes, of fewer ranks, have this form.
    """

    called: str
    n_ranks: int
    pattern: str
    n_special: int
    special_tokens: Callable[[Path | None], list[str]]
    trained: bool = False

    def covers(self, n_ranks: int) -> bool:
        """Say if a file of ``n_ranks`` ranks has this form."""
        smaller = self.trained and n_ranks < self.n_ranks and n_ranks != _N_CL100K_RANKS
        return n_ranks == self.n_ranks or smaller
