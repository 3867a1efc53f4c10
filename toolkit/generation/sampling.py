"""Sample the next token from logits, which are processed in the same order as in transformers.

A row's random number depends on the seed, the index of its prompt and the number of its tokens, so a prompt
gets the same text alone, in any batch, and on any mesh. Sampling inverts the cumulative distribution in fp64.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import ConfigError, Problem

_MAX_PENALTY = 1e30
"""Limit of the repetition penalty and of its inverse, which keeps logits in the range of fp32."""
_MIN_TEMPERATURE = 1e-30
"""Limit of the temperature, which keeps logits in the range of fp32."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options. ``temperature`` 0 is greedy; the other defaults have no effect.

    ``top_k`` keeps the most likely tokens; ``top_p``, the most likely tokens up to this total probability;
    ``min_p``, tokens with at least this fraction of the highest probability. A ``repetition_penalty`` above 1
    (Keskar et al. 2019, arXiv:1909.05858) makes tokens of prompt and text less likely.

    Raises:
        ConfigError: values are out of range; reports all of them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0, which selects the most likely token"),
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


def process_logits(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """Return logits in fp32, with −inf for excluded tokens. ``seen_BV`` marks the tokens that occur in a
    row."""
    logits_BV = logits_BV.float()
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        penalty = min(max(sampling.repetition_penalty, 1 / _MAX_PENALTY), _MAX_PENALTY)
        less_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = torch.where(seen_BV, less_BV, logits_BV)
    if sampling.greedy:
        return logits_BV
    logits_BV = logits_BV / max(sampling.temperature, _MIN_TEMPERATURE)
    if sampling.top_k:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p < 1:
        logits_BV = logits_BV.masked_fill(_outside_top_p(logits_BV, sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        probabilities_BV = logits_BV.softmax(-1)
        least_B1 = sampling.min_p * probabilities_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    return logits_BV


def _outside_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """Mark the tokens that are not among the most likely ones with total probability ``top_p``."""
    ascending_BV, order_BV = logits_BV.sort(-1)
    left_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    left_BV[:, -1] = False
    return torch.zeros_like(left_BV).scatter_(1, order_BV, left_BV)


def sample(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Sample a token (B,) per row by inverting the cumulative distribution at ``uniform_B``, in [0, 1)."""
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    threshold_B1 = uniform_B.to(cumulative_BV)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1)


class RandomNumbers:
    """Uniform random numbers for each prompt, one per generated token."""

    def __init__(self, seed: int, prompts: Sequence[int]):
        self._generators = []
        for prompt in prompts:
            digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
            self._generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little")))

    def next(self) -> Tensor:
        """Return (B,) numbers in [0, 1), in fp64."""
        return torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in self._generators])
