"""The order of samples: a keyed permutation of [0, n) that is computed, not stored.

Swap-or-not (Hoang, Morris and Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO 2012): in each
round r every index x has the partner (K_r − x) mod n, and a keyed coin of the pair decides whether the two
are swapped. The permutation is exact for every n, needs O(1) memory and, unlike a Feistel network, no cycle
walking. The probability that an index never moves is 2**−ROUNDS.

The round keys are bytes of SHAKE-256, and the coin is the finalizer of SplitMix64. All arithmetic is integer,
so the order is the same on every platform and in every version of Python and NumPy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import overload

import numpy as np

ROUNDS = 32


@overload
def permute(index: int, n: int, key: bytes) -> int: ...
@overload
def permute(index: np.ndarray, n: int, key: bytes) -> np.ndarray: ...
def permute(index: int | np.ndarray, n: int, key: bytes) -> int | np.ndarray:
    """Apply the permutation of [0, n) keyed by ``key`` to ``index`` (an integer or int array)."""
    x = np.atleast_1d(np.asarray(index, dtype=np.int64))
    if n < 1 or (x.size and (x.min() < 0 or x.max() >= n)):
        raise IndexError(f"index {index} is not in [0, {n})")
    stream = hashlib.shake_256(key).digest(16 * ROUNDS)
    for start in range(0, 16 * ROUNDS, 16):
        pivot = int.from_bytes(stream[start : start + 8], "little") % n
        salt = np.uint64(int.from_bytes(stream[start + 8 : start + 16], "little"))
        partner = pivot - x
        partner += n * (partner < 0)
        x = np.where(_coin(np.maximum(x, partner).view(np.uint64) ^ salt), partner, x)
    return x if isinstance(index, np.ndarray) else int(x[0])


def _coin(z: np.ndarray) -> np.ndarray:
    """Return one unbiased bit per 64-bit word (Steele, Lea and Flood, "Fast splittable pseudorandom …",
    2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(63)).astype(bool)


def epoch_key(seed: int, epoch: int, part: str = "") -> bytes:
    """Return the key of one epoch's order; each corpus (``part``) of a mixture has its own."""
    return f"llama-toolkit sample order 1, seed {seed}, epoch {epoch}{part and f', part {part}'}".encode()


@dataclass
class CorpusOrder:
    """Order of the samples of one corpus, of which earlier phases of the run have drawn ``first[""]``."""

    n: int
    seed: int
    shuffle: bool
    first: dict[str, int] = field(default_factory=dict)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices of the run's ``samples`` (both int64, same shape)."""
        samples = samples + self.first.get("", 0)
        return corpus_indices(samples, self.n, seed=self.seed, shuffle=self.shuffle)

    def drawn(self, samples: int) -> dict[str, list[int]]:
        """Return how many samples the run has drawn after ``samples`` of this phase, and of how many."""
        return {"": [self.first.get("", 0) + samples, self.n]}


def corpus_indices(samples: np.ndarray, n: int, *, seed: int, shuffle: bool, part: str = "") -> np.ndarray:
    """Map the run's ``samples`` to indices of the corpus's ``n`` samples (both int64, same shape).

    Epoch e consists of the run's samples [e·n, (e+1)·n): each sample of the corpus once, in a new order.
    """
    epochs, indices = np.divmod(samples, n)
    if shuffle:
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            indices[of_epoch] = permute(indices[of_epoch], n, epoch_key(seed, int(epoch), part))
    return indices
