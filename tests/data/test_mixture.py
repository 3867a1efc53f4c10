"""A mixture draws from each part exactly its share of every block, in the part's own order, from anywhere."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.mixture import BLOCK, MixtureOrder, identity, quotas, shares
from toolkit.data.sampler import corpus_indices

SEED = 5
WEIGHTS = {"books": 0.005, "code": 0.3, "web": 0.695}
LENGTHS = [700, 12_345, 800_000]  # the small one is drawn over and over, the large one not once whole
STARTS = np.cumsum([0, *LENGTHS])


def _order(weights: dict[str, float] = WEIGHTS, **changes: Any) -> MixtureOrder:
    return MixtureOrder(weights, **({"lengths": LENGTHS, "seed": SEED, "shuffle": True} | changes))


@pytest.fixture(scope="module")
def million() -> np.ndarray:
    return _order()(np.arange(1_000_000))


# Quotas


@settings(deadline=None)
@given(st.dictionaries(st.text("abcdef", min_size=1), st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_quotas_fill_a_block_and_are_off_by_less_than_one_sample(weights: dict[str, float]) -> None:
    found = quotas(weights)
    assert sum(found.values()) == BLOCK and list(found) == list(weights)
    total = sum(Fraction(str(weight)) for weight in weights.values())
    for name, weight in weights.items():
        assert abs(found[name] - Fraction(str(weight)) * BLOCK / total) < 1
        assert all(found[name] >= found[other] for other in weights if weight > weights[other])


@given(st.integers(1, 9999), st.sampled_from([1, 7, 0.001, 1e12]))
def test_weights_mean_what_is_written(quota: int, scale: float) -> None:
    # As binary fractions some of these sums would miss the share by a hair and lose a sample by rounding.
    weights = {"a": float(f"{quota / BLOCK:.4f}"), "b": float(f"{(BLOCK - quota) / BLOCK:.4f}")}
    assert quotas(weights) == {"a": quota, "b": BLOCK - quota}
    assert quotas({"a": quota * scale, "b": (BLOCK - quota) * scale})["a"] == pytest.approx(quota, abs=1)


def test_ties_go_by_name_and_small_weights_are_refused() -> None:
    assert quotas({"c": 1, "b": 1, "a": 1}) == {"a": 3334, "b": 3333, "c": 3333}
    assert shares({"a": 1, "b": 9999})["a"] == 1 and quotas({"a": 1, "b": 9999})["a"] == 1
    with pytest.raises(ValueError, match="weights of a are below 1 / 10000"):
        quotas({"a": 0.9, "b": 9999})


# The order of a million samples


def test_every_block_has_exactly_the_quotas(million: np.ndarray) -> None:
    part_of = np.searchsorted(STARTS, million, side="right") - 1
    for block in part_of.reshape(-1, BLOCK):
        assert np.bincount(block, minlength=3).tolist() == [50, 3000, 6950]


@pytest.mark.parametrize("part", range(3))
def test_the_draws_of_a_part_are_its_samples_in_its_own_order(million: np.ndarray, part: int) -> None:
    name, n = list(WEIGHTS)[part], LENGTHS[part]
    drawn = million[(million >= STARTS[part]) & (million < STARTS[part + 1])] - STARTS[part]
    assert np.array_equal(drawn, corpus_indices(np.arange(len(drawn)), n, seed=SEED, shuffle=True, part=name))
    whole = len(drawn) // n * n
    assert (np.sort(drawn[:whole].reshape(-1, n)) == np.arange(n)).all(), "each sample once an epoch"
    assert len(np.unique(drawn[whole:])) == len(drawn) - whole, "and at most once in one that is not over"


def test_parts_are_mixed_within_a_block(million: np.ndarray) -> None:
    code = (million >= STARTS[1]) & (million < STARTS[2])
    # 1,000 of the 10,000 positions without replacement: 5 standard deviations of the hypergeometric.
    deviation = math.sqrt(1000 * 0.3 * 0.7 * 9000 / 9999)
    counts = code.reshape(-1, 1000).sum(axis=1)
    assert np.abs(counts - 300).max() < 5 * deviation
    # Each block has a permutation of its own: two agree at 0.3² + 0.7² of the positions.
    blocks = code.reshape(-1, BLOCK)
    agree = (blocks[1:] == blocks[:-1]).mean(axis=1)
    assert np.abs(agree - 0.58).max() < 5 * math.sqrt(0.58 * 0.42 / BLOCK)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_sample_is_the_same_from_wherever_one_looks(million: np.ndarray, data: st.DataObject) -> None:
    start, stride = data.draw(st.integers(0, 900_000)), data.draw(st.integers(1, 5000))
    samples = np.arange(start, min(len(million), start + 40 * stride), stride)
    assert np.array_equal(_order()(samples), million[samples])
    rows = np.reshape(samples[: len(samples) // 2 * 2][::-1], (2, -1))
    assert np.array_equal(_order()(rows), million[rows])


# What the order depends on


def test_golden_values() -> None:
    # A checkpoint's position means these: a change of the order would silently change resumed runs.
    assert _order()(np.arange(8)).tolist() == [5031, 4101, 252742, 688275, 54222, 411813, 332542, 242714]
    assert _order()(np.array([10**6, 10**12])).tolist() == [379617, 152080]


def test_two_corpora_of_one_length_have_orders_of_their_own() -> None:
    indices = _order({"a": 1, "b": 1}, lengths=[1000, 1000])(np.arange(2000))
    first, second = indices[indices < 1000][:900], indices[indices >= 1000][:900] - 1000
    assert (first == second).sum() <= 6  # one on average (Poisson)


def test_seed_block_and_name_change_the_order_and_other_names_only_what_they_draw() -> None:
    samples, weights = np.arange(2 * BLOCK), {"a": 1, "b": 1}
    plain = _order(weights, lengths=[10**6, 10**6])(samples)
    other_seed = _order(weights, lengths=[10**6, 10**6], seed=6)(samples)
    renamed = _order({"a": 1, "c": 1}, lengths=[10**6, 10**6])(samples)
    assert (plain == other_seed).mean() < 0.001
    assert np.array_equal(renamed[plain < 10**6], plain[plain < 10**6])
    assert (renamed == plain)[plain >= 10**6].mean() < 0.001


def test_parts_must_come_by_name() -> None:
    with pytest.raises(ValueError, match="out of order"):
        _order({"b": 1, "a": 1}, lengths=[1, 1])


def test_unshuffled_parts_keep_the_order_of_their_files() -> None:
    indices = _order(shuffle=False)(np.arange(3 * BLOCK))
    for part, quota in enumerate([50, 3000, 6950]):
        drawn = indices[(indices >= STARTS[part]) & (indices < STARTS[part + 1])] - STARTS[part]
        assert np.array_equal(drawn, np.arange(3 * quota) % LENGTHS[part])
    assert (np.diff(indices) != 1).mean() > 0.3, "but they take turns"


# What is said of it


def test_the_start_tells_shares_and_epochs() -> None:
    assert _order().describe(100_000).splitlines() == [
        "mixture of 813,045 samples, of which the run draws 100,000",
        "  books    0.5%  0.71 epochs of 700 samples",
        "  code      30%  2.43 epochs of 12,345 samples",
        "  web     69.5%  0.09 epochs of 800,000 samples",
    ]


def test_identity_tells_names_and_shares() -> None:
    assert identity(quotas({"b": 1, "a": 2})) == {
        "corpus": "mixture of a, b",
        "a.share": "66.67%",
        "b.share": "33.33%",
    }
