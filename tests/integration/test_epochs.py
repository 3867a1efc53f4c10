"""A run that is counted in epochs: its length, its schedule, and going on."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.errors import ConfigError
from toolkit.extensions import register_lr_schedule
from toolkit.trainer import Trainer

BATCH, SAMPLES, EPOCHS, STEPS = 4, 17, 3, 13
"""An epoch is 4.25 steps, and three are 12.75."""
HALVING = {"warmup_steps": 2, "decay_type": "step", "gamma": 0.5}


def _trainer(
    folder: Path, epochs: int, batch: int = BATCH, schedule: dict[str, Any] = HALVING, **checkpoint: Any
) -> Trainer:
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("".join(f"{line} {line * line}\n" for line in range(200)))
    config = small_config(
        folder,
        model={"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 32},
        training={
            "dataset_path": str(corpus),
            "seq_len": 100,
            "global_batch_size": batch,
            "local_batch_size": 2,
            "epochs": epochs,
        },
        lr_scheduler=schedule,
        checkpoint={"enable": True, **checkpoint},
    )
    return small_trainer(config)


def _run(folder: Path, epochs: int) -> dict[str, Any]:
    trainer = _trainer(folder, epochs)
    step, rows = trainer.train_step, Counter[bytes]()

    def counted(batches: Any, **options: Any) -> Any:
        rows.update(row.numpy().tobytes() for batch in batches for row in batch["tokens"])
        return step(batches, **options)

    trainer.train_step = counted  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        trainer.train()
    return {
        "said": said.getvalue(),
        "samples": trainer.loader.epoch_samples,
        "steps": trainer.train_state.step,
        "rows": rows,
        "rates": {record["step"]: record["lr"] for record in trainer.history},
        "losses": {record["step"]: record["loss"] for record in trainer.history},
        "weights": weights_digest(trainer.model_parts.models[0]),
    }


def _runs(folder: str) -> dict[str, Any]:
    whole = _run(Path(folder, "whole"), EPOCHS)
    first = _run(Path(folder, "parts"), 1)
    return {
        "whole": whole,
        "first": first,
        "second": _run(Path(folder, "parts"), EPOCHS),
        "exact": _trainer(Path(folder, "exact"), 150, batch=50).total_steps,
        "resumed": {batch: _trainer(Path(folder, "parts"), 6, batch).total_steps for batch in (2, 4, 8)},
        "anew": _trainer(
            Path(folder, "anew"),
            EPOCHS,
            initial_load_path=str(Path(folder, "parts", "checkpoint", "step-5")),
            initial_load_model_only=False,
            exclude_from_loading=["dataloader"],
        ).total_steps,
        "refused": [_refused(Path(folder, str(last)), last) for last in (13, 12)],
    }


def _refused(folder: Path, last: int) -> str:
    register_lr_schedule(f"until_{last}", lambda step, total: last - step)
    try:
        _trainer(folder, EPOCHS, schedule={"decay_type": f"until_{last}"})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(_runs, 1, str(tmp_path_factory.mktemp("epochs")))[0]


def test_every_sample_is_seen_once_an_epoch(runs: dict[str, Any]) -> None:
    whole = runs["whole"]
    assert (whole["samples"], whole["steps"]) == (SAMPLES, STEPS)
    assert whole["rows"].total() == STEPS * BATCH
    # The last step is filled up with the first sample of the next epoch.
    assert sorted(whole["rows"].values()) == [EPOCHS] * (SAMPLES - 1) + [EPOCHS + 1]


def test_epochs_that_end_with_a_step_need_no_other(runs: dict[str, Any]) -> None:
    # 150 · 17 / 50; in floating point 150 · 0.34 is more than 51.
    assert runs["exact"] == 51


def test_epochs_are_of_samples_where_a_run_goes_on_with_another_batch(runs: dict[str, Any]) -> None:
    left = 6 * SAMPLES - STEPS * BATCH
    assert runs["resumed"] == {batch: STEPS + -(-left // batch) for batch in (2, 4, 8)}


def test_epochs_follow_the_steps_of_another_run_where_the_data_starts_anew(runs: dict[str, Any]) -> None:
    assert runs["anew"] == runs["first"]["steps"] + STEPS


def test_the_rate_falls_with_the_first_step_after_each_epoch(runs: dict[str, Any]) -> None:
    # 4.25 and 8.5 steps are over after the fifth and the ninth.
    factors = [0.5, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert [rate / 3e-3 for rate in runs["whole"]["rates"].values()] == pytest.approx(factors)


def test_rates_of_the_steps_that_epochs_take_are_looked_at(runs: dict[str, Any]) -> None:
    right, wrong = runs["refused"]
    assert right == "" and f"at step {STEPS} of {STEPS}: the rate would be -1.0 of the peak" in wrong


def test_a_finished_run_goes_on_for_more_epochs(runs: dict[str, Any]) -> None:
    whole, first, second = runs["whole"], runs["first"], runs["second"]
    assert first["steps"] == 5 and list(second["losses"]) == list(range(6, STEPS + 1))
    assert first["losses"] | second["losses"] == whole["losses"]
    assert second["weights"] == whole["weights"]
    assert "to continue: the same command with --training.epochs 2;" in first["said"]
    assert f"{STEPS} steps: training.epochs {EPOCHS}, {SAMPLES} samples each" in second["said"]
