"""Garbage is collected at the steps that are named, and at no other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from toolkit.distributed.garbage_collection import GarbageCollection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    def __init__(self) -> None:
        self.itself = self


def steps_survived(garbage: GarbageCollection) -> int:
    """How many steps a reference cycle outlives, each making enough objects to wake Python's collector."""
    alive = weakref.ref(Node())
    for step in range(1, 10):
        waking = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
        del waking
        garbage.after_step(step)
        if alive() is None:
            return step
    return 10


def test_only_every_so_many_steps() -> None:
    assert steps_survived(GarbageCollection(4)) == 4


def test_debugging_collects_after_each_step() -> None:
    assert steps_survived(GarbageCollection(4, debug=True)) == 1


def test_what_start_up_made_is_never_looked_at_again() -> None:
    kept = [Node() for _ in range(10)]
    GarbageCollection(1)
    assert gc.get_freeze_count() > 10
    assert not any(node in gc.get_objects() for node in kept)
