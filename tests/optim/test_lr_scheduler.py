import math
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config import Config
from toolkit.config.optimizer import LRScheduler
from toolkit.config.schema import registry
from toolkit.optim.lr_scheduler import DECAYS, invalid_rate, learning_rate, shortened_phases, warmup_length


def _rate(step, **changes):
    run = {"lr": 1.0, "total_steps": 10}
    run |= {key: changes.pop(key) for key in [*changes] if key in (*run, "steps_an_epoch")}
    return learning_rate(step, LRScheduler(**({"warmup_steps": 2} | changes)), **run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # worked out by hand from the definition of torchtitan 0.2
        ({}, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ({"decay_ratio": 0.4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ({"decay_ratio": 0.0}, [0.5] + [1] * 9),
        ({"warmup_steps": 0, "decay_ratio": 1.0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"decay_ratio": 0.2, "min_lr_factor": 0.1}, [0.5] + [1] * 8 + [0.55]),
        ({"decay_ratio": 0.4, "decay_type": "sqrt"}, [0.5] + [1] * 6 + [0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ({"decay_ratio": 0.2, "decay_type": "cosine"}, [0.5] + [1] * 8 + [0.5]),
        ({"warmup_steps": 99}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        ({"decay_ratio": 0.95}, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ],
)
def test_values_by_hand(changes, expected):
    assert [_rate(step, **changes) for step in range(10)] == pytest.approx(expected, abs=1e-12)


def test_a_registered_schedule_gets_the_steps_of_the_log_and_the_warm_up_multiplies():
    options = LRScheduler(warmup_steps=2).model_copy(update={"decay_type": "own"})
    with mock.patch.dict(registry("lr_scheduler.decay_type"), {"own": lambda step, total: step / total}):
        rates = [learning_rate(step, options, lr=1.0, total_steps=10) for step in range(4)]
    assert rates == pytest.approx([0.05, 0.2, 0.3, 0.4], abs=1e-12)


@pytest.mark.parametrize(
    ("decay", "total_steps", "said"),
    [
        (lambda step, total: 1 / step, None, ""),
        (lambda step, total: 1 / (step - 3), None, "at step 1 of 100: the rate would be -0.5 of the peak"),
        (lambda step, total: 1 / (step - 7) ** 2, None, "at step 7 of 100: ZeroDivisionError: "),
        (lambda step, total: math.exp(step * 99), None, "at step 8 of 100: OverflowError: math range error"),
        (lambda step, total: math.nan, None, "at step 1 of 100: the rate would be nan"),
        (lambda step, total: "x", None, "at step 1 of 100: ValueError: could not convert"),
        (lambda step, total: 1 - step / total, 60, "at step 61 of 100: the rate would be -0.0"),
    ],
)
def test_a_registered_schedule_without_a_rate_is_reported(decay, total_steps, said):
    options = LRScheduler(total_steps=total_steps).model_copy(update={"decay_type": "own"})
    config = Config().model_copy(update={"lr_scheduler": options})
    with mock.patch.dict(registry("lr_scheduler.decay_type"), {"own": decay}):
        problem = invalid_rate(config, range(1, 101), total_steps=100)
    assert (problem.rule if problem else "")[: len(said)] == said and bool(problem) == bool(said)


def test_warmup_is_cut_to_the_run():
    assert [_rate(step, total_steps=4, warmup_steps=8) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def _titan(step, total, warmup, ratio, kind, floor):
    """torchtitan's phases, written the way its scheduler walks them: counts first, then a multiplier."""
    warmup = min(warmup, total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    stable = total + 1 - warmup - decay
    if step < warmup:
        return float((step + 1) / warmup)
    if step < warmup + stable:
        return 1.0
    progress = float(step + 1 - (warmup + stable)) / decay
    if kind == "linear":
        shape = 1 - progress
    elif kind == "sqrt":
        shape = 1 - math.sqrt(progress)
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1 - floor) * shape


@given(
    total=st.integers(1, 300),
    warmup=st.integers(0, 400),
    ratio=st.none() | st.floats(0, 1),
    kind=st.sampled_from(sorted(DECAYS)),
    floor=st.floats(0, 1),
    where=st.floats(0, 1, exclude_max=True),
)
def test_equals_torchtitan_on_every_step_of_a_run(total, warmup, ratio, kind, floor, where):
    step = int(where * total)
    ours = _rate(
        step,
        lr=8e-4,
        total_steps=total,
        warmup_steps=warmup,
        decay_ratio=ratio,
        decay_type=kind,
        min_lr_factor=floor,
    )
    assert ours == pytest.approx(8e-4 * _titan(step, total, warmup, ratio, kind, floor), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("kind", sorted(DECAYS))
def test_stays_at_the_floor_past_the_end(kind):
    """A schedule shorter than the run must not climb again (cosine) or turn negative (linear)."""
    rates = [_rate(step, decay_type=kind, min_lr_factor=0.1) for step in range(10, 40)]
    assert rates == pytest.approx([0.1] * 30)


def _torchs(schedule, steps):
    """Rates of a torch scheduler at each of ``steps`` updates, from a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = schedule(optimizer), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


HUGGING_FACE = {
    "linear": ({}, lambda o: transformers.get_linear_schedule_with_warmup(o, 4, 20)),
    "cosine": ({}, lambda o: transformers.get_cosine_schedule_with_warmup(o, 4, 20)),
    "constant": ({}, lambda o: transformers.get_constant_schedule_with_warmup(o, 4)),
    "wsd": (
        {"decay_type": "cosine", "decay_ratio": 0.25, "min_lr_factor": 0.1},
        lambda o: transformers.get_wsd_schedule(o, 4, 5, num_training_steps=20, min_lr_ratio=0.1),
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_equals_hugging_faces_after_the_warm_up_and_is_a_step_ahead_in_it(name):
    options, theirs = HUGGING_FACE[name]
    options = {"decay_type": name, "total_steps": 20, "warmup_steps": 4} | options
    ours, theirs = [_rate(step, **options) for step in range(20)], _torchs(theirs, 20)
    assert ours[4:] == pytest.approx(theirs[4:], rel=1e-12)
    floor = options.get("min_lr_factor", 0.0)  # from which theirs warms up
    ahead = [floor + (1 - floor) * rate for rate in ours[:4]]
    assert ahead == pytest.approx(theirs[1:5], rel=1e-12)


def test_step_is_torchs_step_lr():
    theirs = _torchs(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7), 11)
    step = {"decay_type": "step", "step_size": 3, "gamma": 0.7}
    assert [_rate(step_, warmup_steps=0, **step) for step_ in range(11)] == pytest.approx(theirs)
    # The warm-up multiplies, and moves no boundary.
    warmed = [_rate(step_, warmup_steps=4, **step) for step_ in range(11)]
    assert warmed == pytest.approx([min(1, (n + 1) / 4) * rate for n, rate in enumerate(theirs)])


@given(samples=st.integers(1, 10**6), batch=st.integers(1, 4096), epoch=st.integers(1, 200))
def test_the_rate_falls_with_the_first_step_after_an_epoch(samples, batch, epoch):
    """In whole numbers: ``step`` batches hold ``epoch`` epochs just when step · batch ≥ epoch · samples."""
    options = {"warmup_steps": 0, "decay_type": "step", "steps_an_epoch": samples / batch, "gamma": 0.5}
    first = -(-epoch * samples // batch)
    for step in (first - 1, first):
        assert _rate(step, **options) == 0.5 ** (step * batch // samples)


def test_endless_shapes_do_not_depend_on_the_length_of_the_run():
    for kind in ("constant", "step"):
        rates = [
            [_rate(step, decay_type=kind, total_steps=total) for step in range(30)] for total in (10, 99)
        ]
        assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("total", "ratio", "steps"),
    [(500, 0.03, 15), (101, 0.03, 4), (100, 0.07, 7), (100, 0.0, 0), (10, 1.0, 10), (7, 0.01, 1)],
)
def test_a_warm_up_by_ratio_is_rounded_up_to_a_step(total, ratio, steps):
    """100 · 0.07 is a little more than 7 in binary, which is no eighth step."""
    assert warmup_length(LRScheduler(warmup_steps=99, warmup_ratio=ratio), total) == steps
    options = {"total_steps": total, "decay_ratio": 0.0}
    for step in range(total):
        by_ratio = _rate(step, warmup_ratio=ratio, **options)
        assert by_ratio == _rate(step, warmup_steps=steps, **options)


def test_says_what_is_cut():
    def cuts(total, warmup, ratio=None, decay=None):
        options = LRScheduler(warmup_steps=warmup, warmup_ratio=ratio, decay_ratio=decay)
        return shortened_phases(options, total)

    assert cuts(100, 20, decay=0.8) == cuts(100, 200, ratio=0.2) == []
    assert "warmup_steps 200 is shortened to the 100 steps" in cuts(100, 200)[0]
    assert "0.8 is 80 steps, shortened to the 70" in cuts(100, 0, ratio=0.3, decay=0.8)[0]
