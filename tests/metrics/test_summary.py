import math
from pathlib import Path

from toolkit.metrics.jsonl import first_loss
from toolkit.metrics.summary import last_values, summary


def _history(steps: int) -> list[dict]:
    return [{"step": step, "loss": 9.0 - step / 10, "tokens_per_second": 1000.0} for step in range(steps)]


def test_a_resumed_run_is_compared_with_its_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 9}\n{"step": 1, "loss": 8.5}\n')
    first = first_loss(tmp_path / "metrics.jsonl")
    history = [{"step": 11, "loss": 4.0, "tokens_per_second": 1.0}]
    text = summary(history, steps=11, tensorboard=None, checkpoint=None, resumed=10, first_loss=first)
    assert text.splitlines()[:2] == [
        "finished 11 steps, resumed from step 10",
        "  training loss    8.500 → 4.000 (mean of the last 1 logged)",
    ]
    assert first_loss(tmp_path / "none.jsonl") is None


def test_a_long_run_averages_its_last_ten_records():
    history = [*_history(60), {"step": 60, "validation_loss": 3.5}]
    text = summary(history, steps=60, tensorboard=Path("tb"), checkpoint=None)
    assert "9.000 → 3.550 (mean of the last 10 logged)" in text
    assert "validation loss  3.500" in text and "1,000 tokens/s" in text
    assert "--logdir tb" in text and "checkpoint" not in text


def test_a_fine_tuning_run_tells_what_was_before_what_was_trained_and_its_memory():
    losses = {0: 3.0, 20: 1.5, 40: 2.0}
    history = [{"step": step, "validation_loss": loss} for step, loss in losses.items()]
    history.append({"step": 40, "memory_gib": 2.0, "memory_peak_gib": 2.5})
    text = summary(history, steps=40, tensorboard=None, checkpoint=None, trained="8 of 80 parameters")
    assert "3.000 → 2.000 (perplexity 20.09 → 7.39), lowest 1.500 at step 20" in text
    assert "trained          8 of 80 parameters\n  peak memory      2.50 GiB" in text


def test_a_loss_beyond_any_perplexity_does_not_end_the_summary():
    history = [{"step": 0, "validation_loss": 800.0}, {"step": 9, "validation_loss": 2.0}]
    text = summary(history, steps=9, tensorboard=None, checkpoint=None)
    assert "800.000 → 2.000 (perplexity inf → 7.39)" in text


def test_the_loss_of_a_batch_that_was_skipped_is_left_out():
    skipped = [{"step": 60, "event": "SKIPPED"}, {"step": 60, "loss": math.nan, "tokens_per_second": 1000.0}]
    text = summary([*_history(60), *skipped], steps=60, tensorboard=None, checkpoint=None)
    assert "9.000 → 3.550 (mean of the last 10 logged)" in text


def test_a_short_run_does_not_average_its_beginning():
    assert last_values(_history(8), "loss") == [9.0 - 0.6, 9.0 - 0.7]
    assert last_values(_history(1), "loss") == [9.0]


def test_a_run_that_only_validated_has_no_speed():
    text = summary([{"step": 1, "validation_loss": 2.0}], steps=1, tensorboard=None, checkpoint=None)
    assert text == "finished 1 steps\n  validation loss  2.000"
