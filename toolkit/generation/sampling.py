"""From logits to the next token: what is changed and left out, in the order of transformers, then a draw.

The draw of a row depends on the seed, the number of its prompt and how many tokens it has had, so that a
prompt gets the same text alone, in any batch and on any mesh. It inverts the cumulated probabilities at one
number, in fp64.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import ConfigError, Problem

_STRONGEST = 1e30
"""A repetition penalty, or one over it, that leaves logits in fp32's range; no stronger one is used."""
_COLDEST = 1e-30
"""A temperature at which any two logits are far apart, and none leaves fp32's range; no lower one is used."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. ``temperature`` 0 takes the likeliest; the defaults of the rest change nothing.

    ``top_k`` keeps so many of the likeliest; ``top_p`` the likeliest that together have this probability;
    ``min_p`` those of at least this share of the likeliest one's. ``repetition_penalty`` (Keskar et al. 2019,
    arXiv:1909.05858) makes tokens of prompt and text less likely, above 1.

    Raises:
        ConfigError: a value outside its range; all of them at once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0, which takes the likeliest token"),
            "top_k": (self.top_k >= 0, "at least 0, which keeps all tokens"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1, which keeps all tokens"),
            "min_p": (0 <= self.min_p <= 1, "between 0, which keeps all tokens, and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 changes nothing"),
        }
        broken = [
            Problem(f"{name} must be {rule}", f"choose a {name} in this range", name, getattr(self, name))
            for name, (holds, rule) in rules.items()
            if not holds
        ]
        if broken:
            raise ConfigError(broken)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def processed(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """Logits in fp32, those of tokens left out −inf. ``seen_BV`` tells the tokens that a row has had."""
    logits_BV = logits_BV.float()
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        penalty = min(max(sampling.repetition_penalty, 1 / _STRONGEST), _STRONGEST)
        less_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = torch.where(seen_BV, less_BV, logits_BV)
    if sampling.greedy:
        return logits_BV
    logits_BV = logits_BV / max(sampling.temperature, _COLDEST)
    if sampling.top_k:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        logits_BV = logits_BV.masked_fill(_beyond(logits_BV, sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        probabilities_BV = logits_BV.softmax(-1)
        least_B1 = sampling.min_p * probabilities_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    return logits_BV


def _beyond(logits_BV: Tensor, top_p: float) -> Tensor:
    """The tokens left when the likeliest with a probability of ``top_p`` are taken; never the likeliest."""
    ascending_BV, order_BV = logits_BV.sort(-1)
    left_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    left_BV[:, -1] = False
    return torch.zeros_like(left_BV).scatter_(1, order_BV, left_BV)


def draw(logits_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """A token (B,) of each row: where the cumulated probabilities pass a number of at least 0, below 1."""
    cumulated_BV = logits_BV.double().softmax(-1).cumsum(-1)
    passed_B1 = numbers_B.to(cumulated_BV)[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, passed_B1, right=True).squeeze(1)


class Draws:
    """The numbers that decide for each of some prompts, one a step."""

    def __init__(self, seed: int, prompts: Sequence[int]):
        self._generators = []
        for prompt in prompts:
            digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
            self._generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little")))

    def next(self) -> Tensor:
        """(B,) fp64 of at least 0 and below 1."""
        return torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in self._generators])
