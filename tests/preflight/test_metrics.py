"""Notes about metrics and profiles that will show nothing."""

from __future__ import annotations

import pytest

from tests.preflight.bad_runs import CPU, configure
from toolkit.preflight.planned_run import PlannedRun
from toolkit.preflight.rules.metrics import metrics_notes


@pytest.mark.parametrize(
    ("length", "noted"),
    [("--training.steps=9", True), ("--training.steps=10", False), ("--training.epochs=1", False)],
)
def test_a_run_that_ends_before_its_first_trace_is_noted(length: str, noted: bool) -> None:
    flags = ["--profiling.enable_profiling", "--profiling.profile_freq=10", length]
    assert bool(metrics_notes(PlannedRun(configure(flags), 1, CPU))) is noted
