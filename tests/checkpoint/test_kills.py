"""A run that is killed at any moment goes on from its newest checkpoint, to the last bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.checkpoint.kills import chain, result, start
from tests.s3_server import running
from toolkit.storage.remote_calls import file_system

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]
KILLS, SEED = 2, 6
"""A seed by which each kill is within a tenth of a second of one of the first saves: no start ends before."""


def _uninterrupted(folder: Path, model: str) -> Mapping[str, str]:
    outcome = start(folder, "disabled", None, model=model)
    assert outcome.problems == []
    return result(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return _uninterrupted(tmp_path_factory.mktemp("kills") / "uninterrupted", "dense")


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_if_it_never_was(
    uninterrupted: Mapping[str, str], tmp_path: Path, mode: str
) -> None:
    """``python -m benchmarks.kills`` does it 200 times."""
    outcomes = chain(tmp_path / "run", mode, random.Random(SEED), KILLS, uninterrupted)
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert sum(outcome.killed for outcome in outcomes) == KILLS


@pytest.mark.slow
def test_a_killed_run_with_experts_goes_on_too(tmp_path: Path) -> None:
    """Under expert parallelism, with biases of experts, saving in the background."""
    expected = _uninterrupted(tmp_path / "uninterrupted", "experts")
    assert any(name.endswith("expert_bias") for name in expected)
    outcomes = chain(tmp_path / "run", "async", random.Random(SEED), KILLS, expected, model="experts")
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert sum(outcome.killed for outcome in outcomes) == KILLS


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_from_a_store_that_falls_as_well(
    uninterrupted: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m benchmarks.kills --storage`` does it 200 times."""
    with running(tmp_path / "store") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        file_system.cache_clear()
        outcomes = chain(tmp_path / "run", "async", random.Random(SEED), KILLS, uninterrupted, server)
        file_system.cache_clear()
    assert [problem for outcome in outcomes for problem in outcome.problems] == []
    assert any(outcome.falls for outcome in outcomes)
