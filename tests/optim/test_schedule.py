import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.optim.schedule import DECAYS, learning_rate


def _rate(step, **changes):
    options = dict(
        lr=1.0, total_steps=10, warmup_steps=2, decay_ratio=None, decay_type="linear", min_lr_factor=0.0
    )
    return learning_rate(step, **(options | changes))


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
