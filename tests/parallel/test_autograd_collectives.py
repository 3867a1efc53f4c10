"""Each strategy sends what it should, operation by operation, and gradients are those of one process.

fp64: layouts differ by the order of sums alone, some 1e-15; a wrong factor or a lost micro-batch is
at least 1e-2.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.helpers import run_world
from tests.parallel.sharded import (
    EXACT,
    FULL,
    KEEP_ALL,
    STRATEGIES,
    TIED,
    UNTIED,
    Collectives,
    changed,
    furthest,
    gradients,
    groups,
    plain_gradients,
    sharded,
    step,
)
from toolkit import cpu

ACCUMULATIONS = (1, 3)
UNITS = 4  # embedding, two blocks, norm and head
NESTED = {
    "fsdp_wrap_policy": "class",
    "fsdp_wrap_classes": ["TransformerBlock", "Attention", "FeedForward"],
}


def _all_strategies() -> dict[Any, Any]:
    found = {}
    expected = plain_gradients(UNTIED)
    for name, (replicate, reshard) in STRATEGIES.items():
        how = changed(EXACT, fsdp_reshard_after_forward=reshard)
        model = sharded(UNTIED, how, replicate=replicate)
        for accumulation, sync in product(ACCUMULATIONS, (True, False)):
            with Collectives() as sent:
                step(model, changed(how, fsdp_sync_each_batch=sync), accumulation)
            found[name, accumulation, sync] = dict(sent.counts), furthest(gradients(model), expected)
            model.zero_grad()
    return found


def _nested() -> dict[str, Any]:
    """Units in units, under activation checkpointing, with explicit prefetch."""
    found = {}
    expected = plain_gradients(TIED)
    for depth in (0, 2, 99):
        how = changed(EXACT, fsdp_forward_prefetch=depth, fsdp_backward_prefetch=max(depth, 1), **NESTED)
        for checkpointing in (KEEP_ALL, FULL):
            model = sharded(TIED, how, checkpointing=checkpointing)
            with Collectives() as sent:
                step(model, how)
            units = len(groups(model))
            far = furthest(gradients(model), expected)
            found[f"{checkpointing.mode} {depth}"] = units, dict(sent.counts), far
    return found


def _world() -> tuple[dict[Any, Any], dict[str, Any]]:
    cpu.enable(False)  # shared memory stands for the same collectives; gloo's can be counted
    return _all_strategies(), _nested()


@pytest.fixture(scope="module")
def world() -> list[Any]:
    return run_world(_world, 4)


@pytest.mark.parametrize("sync", [True, False], ids=["each", "once"])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_what_must_be_sent_is_sent(
    world: list[Any], strategy: str, accumulation: int, sync: bool
) -> None:
    gathered_once, reduced = UNITS, UNITS * (accumulation if sync else 1)
    # Again in backward: not the last unit, which is still there, nor the embedding, whose backward reads
    # the tokens alone.
    gathered_twice = (2 * UNITS - 2) * accumulation
    expected = {
        "FULL_SHARD": {"allgather": gathered_twice, "reduce_scatter": reduced},
        "SHARD_GRAD_OP": {"allgather": gathered_once, "reduce_scatter": reduced},
        "NO_SHARD": {"allreduce": UNITS},
        "HYBRID_SHARD": {"allgather": gathered_twice, "reduce_scatter": reduced, "allreduce": UNITS},
        "HYBRID_SHARD_ZERO2": {"allgather": gathered_once, "reduce_scatter": reduced, "allreduce": UNITS},
    }
    for strategies, _ in world:
        counts, far = strategies[strategy, accumulation, sync]
        assert counts == expected[strategy]
        assert far < 1e-12


def test_units_in_units_are_gathered_once_a_pass_whatever_is_asked_ahead(world: list[Any]) -> None:
    # The root, and attention, feed-forward and the two norms of each of two blocks. Neither the root
    # nor the last unit is gathered again.
    for _, nested in world:
        for name, (units, counts, far) in nested.items():
            assert units == 1 + 2 * 3, name
            assert counts == {"allgather": 2 * units - 2, "reduce_scatter": units}, name
            assert far < 1e-12, name
