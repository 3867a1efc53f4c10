"""Format of a family's tiktoken files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_N_CL100K_RANKS = 100_256  # GPT-4's, which resembles a trained file but has other special tokens


@dataclass(frozen=True)
class TiktokenForm:
    """Settings that a tiktoken file of ``n_ranks`` ranks does not contain.

    Attributes:
        display_name: name of the models in messages.
        pattern: pre-tokenization regex, which splits text before BPE merges.
        n_special: number of special tokens after the ranks.
        special_tokens: function from the model folder to the special tokens in id order; None for a tokenizer
            of no published model.
        trained: ``llama-toolkit train-tokenizer`` writes files in this format, with fewer ranks.
    """

    display_name: str
    n_ranks: int
    pattern: str
    n_special: int
    special_tokens: Callable[[Path | None], list[str]]
    trained: bool = False

    def matches(self, n_ranks: int) -> bool:
        """Return whether a file of ``n_ranks`` ranks has this format."""
        smaller = self.trained and n_ranks < self.n_ranks and n_ranks != _N_CL100K_RANKS
        return n_ranks == self.n_ranks or smaller
