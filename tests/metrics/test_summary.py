from pathlib import Path

from toolkit.metrics.summary import last, summary


def _history(steps: int) -> list[dict]:
    return [{"step": step, "loss": 9.0 - step / 10, "tokens_per_second": 1000.0} for step in range(steps)]


def test_a_long_run_averages_its_last_ten_records():
    history = [*_history(60), {"step": 60, "validation_loss": 3.5}]
    text = summary(history, steps=60, tensorboard=Path("tb"), checkpoint=None)
    assert "9.000 → 3.550 (mean of the last 10 logged)" in text
    assert "validation loss  3.500" in text and "1,000 tokens/s" in text
    assert "--logdir tb" in text and "checkpoint" not in text


def test_a_short_run_does_not_average_its_beginning():
    assert last(_history(8), "loss") == [9.0 - 0.6, 9.0 - 0.7]
    assert last(_history(1), "loss") == [9.0]


def test_a_run_that_only_validated_has_no_speed():
    text = summary([{"step": 1, "validation_loss": 2.0}], steps=1, tensorboard=None, checkpoint=None)
    assert text == "finished 1 steps\n  validation loss  2.000"
