"""Weighted mixtures: map each sample of a run to a sample of a corpus by computation, without a table.

The run is split into blocks of BLOCK samples. In every block, each part of the mixture has the same number of
samples, its quota: the weight's share of BLOCK, rounded by largest remainder. Within block b

    the positions are permuted by swap-or-not (``sampler.permute``), keyed by seed and b;
    the quotas are consecutive ranges of [0, BLOCK): the range of a position's image determines its part;
    the r-th of the block's positions that draw part i, in order of position, gets draw b·quota_i + r of i.

Therefore the draws of each part are 0, 1, 2, … in the order of the run. Draw j of a part is sample j of a run
over that part alone (``sampler.corpus_indices``), additionally keyed by the part's name, so that two corpora
of the same length have different permutations. Each part has its own epochs.

A sample depends on its number, on the seed, and on the names, weights and lengths of the parts, but not on
the order of the parts, ranks or batches. Computing a sample takes O(1) time, given the keys of each part's
epoch and the table of its block; the last few tables are cached.

Without shuffling, each part yields its samples in file order; the parts are interleaved as above.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from toolkit.data.sampler import corpus_indices, permute

BLOCK = 10_000


def shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Return the exact number of samples per block for each weight, which is read as a decimal number."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    return {name: weight * BLOCK / total for name, weight in exact.items()}


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the number of samples of each part per block: shares rounded by largest remainder.

    Raises:
        ValueError: A weight is below one sample per block.
    """
    asked = shares(weights)
    if small := [name for name, share in asked.items() if share < 1]:
        raise ValueError(f"the weights of {', '.join(small)} are below 1 / {BLOCK} of the sum")
    counts = {name: int(share) for name, share in asked.items()}
    by_remainder = sorted(asked, key=lambda name: (counts[name] - asked[name], name))
    for name in by_remainder[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    return counts


class MixtureOrder:
    """Order of a mixture's samples. The indices of a part follow those of the preceding parts."""

    def __init__(self, weights: Mapping[str, float], lengths: Sequence[int], *, seed: int, shuffle: bool):
        """``lengths`` are numbers of samples; parts are in ascending order of name."""
        if list(weights) != sorted(weights):
            raise ValueError(f"parts out of order: {list(weights)}")
        self.quotas, self.lengths = quotas(weights), tuple(lengths)
        self.seed, self.shuffle = seed, shuffle
        self.first: dict[str, int] = {}  # samples of each part drawn in earlier phases of the run

    def __len__(self) -> int:
        """Return the total number of samples of all parts, one epoch of a mixture."""
        return sum(self.lengths)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices of the run's ``samples`` (both int64, same shape)."""
        blocks, positions = np.divmod(samples, BLOCK)
        parts, ranks = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks):
            mask = blocks == block
            part_at, rank_at = _block_table(self.seed, tuple(self.quotas.values()), int(block))
            parts[mask], ranks[mask] = part_at[positions[mask]], rank_at[positions[mask]]
        indices, start = np.empty_like(samples), 0
        for part, (name, quota) in enumerate(self.quotas.items()):
            mask, n = parts == part, self.lengths[part]
            draws = self.first.get(name, 0) + blocks[mask] * quota + ranks[mask]
            indices[mask] = start + corpus_indices(draws, n, seed=self.seed, shuffle=self.shuffle, part=name)
            start += n
        return indices

    def drawn(self, samples: int) -> dict[str, list[int]]:
        """Return how many samples of each part the run has drawn after ``samples`` of this phase, and its
        length."""
        blocks, rest = divmod(samples, BLOCK)
        part_at, _ = _block_table(self.seed, tuple(self.quotas.values()), blocks)
        drawn = np.bincount(part_at[:rest], minlength=len(self.quotas)).tolist()
        parts = zip(self.quotas.items(), drawn, self.lengths, strict=True)
        return {name: [self.first.get(name, 0) + blocks * quota + n, of] for (name, quota), n, of in parts}

    def describe(self, samples: int) -> str:
        """Return one line per part: its share, its samples, and its epochs in a run of ``samples``."""
        width = max(map(len, self.quotas))
        lines = [f"mixture of {len(self):,} samples, of which the run draws {samples:,}"]
        for (name, quota), n in zip(self.quotas.items(), self.lengths, strict=True):
            epochs = samples * quota / BLOCK / n
            lines.append(f"  {name:{width}}  {percent(quota):>6}  {epochs:.2f} epochs of {n:,} samples")
        return "\n".join(lines)


def percent(quota: int) -> str:
    """Format a quota as a share of the samples."""
    return f"{quota * 100 / BLOCK:g}%"


def identity(counts: Mapping[str, int]) -> dict[str, str]:
    """Describe the order of a mixture with these quotas for comparison, without its corpora."""
    about = {f"{name}.share": percent(counts[name]) for name in sorted(counts)}
    return {"corpus": f"mixture of {', '.join(sorted(counts))}"} | about


@functools.lru_cache(maxsize=4)
def _block_table(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each position of a block, its part and its rank among the positions of that part."""
    key = f"llama-toolkit mixture 1, seed {seed}, block {block}".encode()
    image = permute(np.arange(BLOCK), BLOCK, key)
    parts = np.searchsorted(np.cumsum(counts), image, side="right")
    ranks = np.empty(BLOCK, np.int64)
    ranks[np.argsort(parts, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
    return parts, ranks
