"""When a run stops by itself, so that it can save before its time is over."""

from __future__ import annotations

import pytest

from toolkit.launcher.time_limit import RESERVE, SLURM_END, Deadline


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def _stops_at(deadline: Deadline, clock: _Clock, lap: float) -> float:
    """Seconds after the start at which a run of such laps asks to stop."""
    start = clock.now
    while not deadline.near():
        clock.now += lap
        deadline.lap()
        assert clock.now < start + 1e6
    return clock.now - start


def test_without_a_limit_it_is_never_near(clock: _Clock) -> None:
    clock.now = 1e12
    assert not Deadline(None, {}, clock).near()
    assert not Deadline(None, {SLURM_END: "unknown"}, clock).near()


@pytest.mark.parametrize("lap", [1.0, 30.0, 300.0])
def test_two_laps_and_a_reserve_fit_between_the_stop_and_the_end(clock: _Clock, lap: float) -> None:
    stopped = _stops_at(Deadline(60, {}, clock), clock, lap)
    assert 3600 - 3 * lap - RESERVE <= stopped + lap
    assert stopped <= 3600 - 2 * lap - RESERVE + lap


def test_the_slowest_lap_counts(clock: _Clock) -> None:
    """A save is part of few laps."""
    deadline = Deadline(60, {}, clock)
    clock.now += 400
    deadline.lap()
    assert _stops_at(deadline, clock, 1.0) + 400 == pytest.approx(3600 - 800 - RESERVE, abs=2)


def test_the_start_of_a_run_is_no_lap(clock: _Clock) -> None:
    deadline = Deadline(60, {}, clock)
    clock.now += 1000
    deadline.begin()
    assert _stops_at(deadline, clock, 1.0) + 1000 == pytest.approx(3600 - 2 - RESERVE, abs=2)


def test_the_earlier_of_two_ends_counts(clock: _Clock) -> None:
    slurm = {SLURM_END: "1600"}
    assert 530 < _stops_at(Deadline(60, slurm, clock, time_of_day=lambda: 1000.0), clock, 1.0) < 600
    assert 260 < _stops_at(Deadline(5, slurm, clock, time_of_day=lambda: 1000.0), clock, 1.0) < 300


def test_a_short_limit_leaves_time_to_train(clock: _Clock) -> None:
    assert _stops_at(Deadline(1, {}, clock), clock, 0.1) > 50
