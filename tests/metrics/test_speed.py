from contextlib import nullcontext

import pytest

from toolkit.metrics.speed import SpeedMeter


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return _Clock()


def _train(meter, clock, *, steps, seconds, waiting=0.0, tokens=1000):
    for _ in range(steps):
        with meter.data_wait():
            clock.now += waiting
        clock.now += seconds - waiting
        meter.step(tokens)


def test_means_over_the_steps_since_the_last_reading(clock):
    meter = SpeedMeter(flops_per_step=1e9, peak_flops=2e9, clock=clock)
    _train(meter, clock, steps=4, seconds=2.0, waiting=0.5)
    assert meter.read() == pytest.approx(
        {"tokens_per_second": 500.0, "step_seconds": 2.0, "data_seconds": 0.5, "mfu": 0.25}
    )
    _train(meter, clock, steps=1, seconds=1.0)
    assert meter.read() == pytest.approx(
        {"tokens_per_second": 1000.0, "step_seconds": 1.0, "data_seconds": 0.0, "mfu": 0.5}
    )


def test_what_is_not_training_is_told_apart(clock):
    meter = SpeedMeter(clock=clock)
    _train(meter, clock, steps=2, seconds=1.0)
    for _ in range(2):
        with meter.exclude("checkpoint"):
            clock.now += 30.0
    with meter.exclude("validation"):
        clock.now += 5.0
    reading = meter.read()
    assert (reading["checkpoint_seconds"], reading["validation_seconds"]) == (60.0, 5.0)
    assert (reading["tokens_per_second"], reading["step_seconds"]) == (1000.0, 1.0)
    _train(meter, clock, steps=1, seconds=1.0)
    assert "checkpoint_seconds" not in meter.read()


@pytest.mark.parametrize("known", [{"flops_per_step": 1e9}, {"peak_flops": 1e12}, {}])
def test_mfu_is_none_where_the_device_is_unknown(clock, known):
    meter = SpeedMeter(**known, clock=clock)
    _train(meter, clock, steps=1, seconds=1.0)
    assert meter.read()["mfu"] is None


def test_a_profiler_is_told_what_waits_and_what_is_apart(clock):
    ranges = []
    meter = SpeedMeter(clock=clock, mark=lambda name: nullcontext(ranges.append(name)))
    with meter.data_wait(), meter.exclude("validation"):
        pass
    assert ranges == ["data", "validation"]
