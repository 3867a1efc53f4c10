"""Weighted mixtures: which corpus, and which of its samples, each sample of a run is, without a table of it.

The run is cut into blocks of BLOCK samples, and every block has the same number of samples of each part: its
quota, the weight's share of BLOCK rounded by largest remainder. Within block b

    the positions are permuted by swap-or-not (``order.permute``), keyed by seed and b;
    the quotas lie end to end in [0, BLOCK): where the image of a position falls says which part it draws;
    the r-th of the block's positions that draw part i, in order of position, takes draw b·quota_i + r of i.

So each part's draws are 0, 1, 2, … in the order of the run, and draw j of a part is what sample j would be of
a run over that part alone: ``order.corpus_indices``, keyed by the part's name as well, so that two corpora of
one length do not share a permutation. The parts go through their epochs each at its own pace.

What a sample is depends on the seed, on the names, weights and lengths of the parts and on its number; not on
the order in which the parts are given, nor on ranks or batches. It costs O(1) given the table of its block,
which is kept while it is among the last few, and the keys of each part's epoch.

Without shuffling each part gives its samples in the order of its files; the parts stay interleaved as above.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from toolkit.data.sampler import corpus_indices, permute

BLOCK = 10_000


def shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """The samples of a block that each weight asks for, exactly, the weights read as decimals."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    return {name: weight * BLOCK / total for name, weight in exact.items()}


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """The samples of a block that each part gets: shares rounded down, then one more by largest remainder.

    Raises:
        ValueError: a weight is below one sample in BLOCK.
    """
    asked = shares(weights)
    if small := [name for name, share in asked.items() if share < 1]:
        raise ValueError(f"the weights of {', '.join(small)} are below 1 / {BLOCK} of the sum")
    found = {name: int(share) for name, share in asked.items()}
    by_remainder = sorted(asked, key=lambda name: (found[name] - asked[name], name))
    for name in by_remainder[: BLOCK - sum(found.values())]:
        found[name] += 1
    return found


class MixtureOrder:
    """The order of a mixture's samples. Index k of the first part is k, of the next its length more, …"""

    def __init__(self, weights: Mapping[str, float], lengths: Sequence[int], *, seed: int, shuffle: bool):
        """``lengths`` are the samples of each part; both in ascending order of the names."""
        if list(weights) != sorted(weights):
            raise ValueError(f"parts out of order: {list(weights)}")
        self.quotas, self.lengths = quotas(weights), tuple(lengths)
        self.seed, self.shuffle = seed, shuffle

    def __len__(self) -> int:
        """The samples of all parts together, which is what an epoch of a mixture is."""
        return sum(self.lengths)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The indices of the run's ``samples`` (both int64, same shape)."""
        blocks, positions = np.divmod(samples, BLOCK)
        parts, ranks = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks):
            here = blocks == block
            part_at, rank_at = _block_table(self.seed, tuple(self.quotas.values()), int(block))
            parts[here], ranks[here] = part_at[positions[here]], rank_at[positions[here]]
        indices, start = np.empty_like(samples), 0
        for part, (name, quota) in enumerate(self.quotas.items()):
            here, n = parts == part, self.lengths[part]
            draws = blocks[here] * quota + ranks[here]
            indices[here] = start + corpus_indices(draws, n, seed=self.seed, shuffle=self.shuffle, part=name)
            start += n
        return indices

    def describe(self, samples: int) -> str:
        """A line for each part: its share, its samples, and how often a run of ``samples`` goes over them."""
        width = max(map(len, self.quotas))
        lines = [f"mixture of {len(self):,} samples, of which the run draws {samples:,}"]
        for (name, quota), n in zip(self.quotas.items(), self.lengths, strict=True):
            epochs = samples * quota / BLOCK / n
            lines.append(f"  {name:{width}}  {percent(quota):>6}  {epochs:.2f} epochs of {n:,} samples")
        return "\n".join(lines)


def percent(quota: int) -> str:
    """A quota as a share of the samples."""
    return f"{quota * 100 / BLOCK:g}%"


def identity(found: Mapping[str, int]) -> dict[str, str]:
    """Describe the order of a mixture with these quotas, but for its corpora, so that two can be compared."""
    about = {f"{name}.share": percent(found[name]) for name in sorted(found)}
    return {"corpus": f"mixture of {', '.join(sorted(found))}"} | about


@functools.lru_cache(maxsize=4)
def _block_table(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position of a block: the part that it draws, and its rank among those that do."""
    key = f"llama-toolkit mixture 1, seed {seed}, block {block}".encode()
    image = permute(np.arange(BLOCK), BLOCK, key)
    parts = np.searchsorted(np.cumsum(counts), image, side="right")
    ranks = np.empty(BLOCK, np.int64)
    ranks[np.argsort(parts, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
    return parts, ranks
