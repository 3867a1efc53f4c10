"""Clocks of ranks that go wrong, and what is told of them."""

from __future__ import annotations

import time

import torch.distributed as dist

from tests.helpers import run_world
from toolkit.distributed.clocks import clock_offsets, clock_skew, skew_warnings


def _offsets(ahead: list[float]) -> tuple[list[float], list[str]]:
    own = ahead[dist.get_rank()]
    return clock_offsets(lambda: time.time() + own), clock_skew()


def test_offsets_are_found_on_every_rank() -> None:
    ahead = [100.0, 100.0, 97.5]
    for offsets, told in run_world(_offsets, 3, ahead):
        assert offsets[0] == 0.0
        # Ranks that wait for a core leave the collective late.
        assert abs(offsets[1]) < 0.5 and abs(offsets[2] + 2.5) < 0.5
        assert told == []  # one machine has one clock


def test_a_clock_that_is_off_is_named() -> None:
    told = skew_warnings({"a": 0.0, "b": 3.25, "c": -0.4, "d": -20.0}, "a")
    assert [line.split(":")[0] for line in told] == [
        "the clock of b is 3.2 s ahead of that of a",
        "the clock of d is 20.0 s behind that of a",
    ]
