"""The order of samples is a permutation, the same everywhere, and looks like a random one."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.sampler import corpus_indices, epoch_key, permute


@settings(deadline=None)
@given(n=st.integers(1, 3000), key=st.binary(max_size=40))
def test_every_index_is_hit_exactly_once(n: int, key: bytes) -> None:
    order = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(order), np.arange(n))


@settings(deadline=None)
@given(n=st.integers(1, 1 << 62), data=st.data())
def test_a_number_and_an_array_agree_and_stay_in_range(n: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8, unique=True))
    order = permute(np.array(indices), n, b"key")
    assert [permute(index, n, b"key") for index in indices] == order.tolist()
    assert len(set(order.tolist())) == len(indices)
    assert order.min() >= 0 and order.max() < n


def test_golden_values() -> None:
    # A checkpoint's position means these: a change of the order would silently change resumed runs.
    assert permute(np.arange(10), 10, epoch_key(0, 0)).tolist() == [7, 2, 3, 9, 1, 5, 6, 0, 8, 4]
    assert [permute(index, 10**15, epoch_key(7, 3)) for index in (0, 1, 10**15 - 1)] == [
        270097063515439,
        548524886766818,
        939469250063796,
    ]


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 5\)"):
        permute(index, 5, b"")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_small_corpus_gets_every_order_equally_often(n: int) -> None:
    trials = 1200
    counts = Counter(tuple(permute(np.arange(n), n, epoch_key(1, epoch))) for epoch in range(trials))
    assert len(counts) == math.factorial(n)
    expected = trials / math.factorial(n)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    # The keys are fixed, so this cannot be flaky; 3 standard deviations above the mean of the chi-square.
    freedom = math.factorial(n) - 1
    assert chi_square < freedom + 3 * math.sqrt(2 * freedom)


def test_a_large_corpus_is_mixed_like_a_random_permutation() -> None:
    n = 20_000
    order = permute(np.arange(n), n, epoch_key(0, 0))
    # Bounds are 4 standard deviations of a uniformly random permutation.
    displacement = np.abs(order - np.arange(n)).mean() / n
    assert abs(displacement - 1 / 3) < 4 * math.sqrt(2 / 45 / n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / math.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / math.sqrt(n)
    assert (order == np.arange(n)).sum() <= 1 + 4
    neighbours = np.abs(np.diff(order)) == 1  # of which a random permutation has two on average
    assert neighbours.sum() <= 2 + 4 * math.sqrt(2)
    sixteenths = np.bincount(order[: n // 16] * 16 // n, minlength=16)
    assert np.abs(sixteenths - n / 256).max() < 4 * math.sqrt(n / 256)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    orders = [permute(np.arange(n), n, epoch_key(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    for first in range(4):
        for second in range(first):
            # Two independent permutations agree in one place on average (Poisson).
            assert (orders[first] == orders[second]).sum() <= 6


@settings(deadline=None)
@given(n=st.integers(1, 50), start=st.integers(0, 100), count=st.integers(1, 50), shuffle=st.booleans())
def test_an_epoch_gives_each_sample_once_wherever_one_starts(
    n: int, start: int, count: int, shuffle: bool
) -> None:
    whole = corpus_indices(np.arange(150), n, seed=5, shuffle=shuffle)
    for epoch in range(150 // n):
        assert sorted(whole[epoch * n : (epoch + 1) * n]) == list(range(n))
    part = corpus_indices(np.arange(start, start + count), n, seed=5, shuffle=shuffle)
    assert np.array_equal(part, whole[start : start + count])
    if not shuffle:
        assert np.array_equal(whole, np.arange(150) % n)
