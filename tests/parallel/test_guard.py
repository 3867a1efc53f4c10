"""Losses that are not finite or far too high: skipped or rolled back from, alike on every mesh."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import in_layout, run_world
from tests.training import MESHES, small_config, small_trainer, weights_digest
from toolkit.config.job import Health
from toolkit.errors import TrainingError
from toolkit.parallel.guard import FINITE, Guard
from toolkit.trainer import Trainer

STEPS = 10
NAN = float("nan")
FACTORS = {16 * 4: NAN, 16 * 8: 1e4}
"""Factors of losses by the first sample of a batch: in step 5, and in step 7 if 48 to 80 are skipped."""
HEALTH = {
    "nan_policy": "rollback",
    "loss_spike_policy": "skip",
    "loss_spike_window": 4,
    "loss_spike_sigma": 20.0,
}
LAYOUTS = {1: ["fsdp"], 2: list(MESHES)}


def _trainer(
    folder: Path,
    health: dict[str, Any],
    *,
    steps: int = STEPS,
    checkpoint: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **tables: Any,
) -> Trainer:
    return small_trainer(
        small_config(
            folder,
            health=health,
            training={"steps": steps, "local_batch_size": 8, "max_norm": 0.5} | (training or {}),
            lr_scheduler={"warmup_steps": 2, "total_steps": STEPS},
            checkpoint={"enable": True, "interval": 3} | (checkpoint or {}),
            **tables,
        )
    )


def _spoil(trainer: Trainer, factors: dict[int, float]) -> dict[int, int]:
    """Multiply the loss, and its gradient, of the global batches that begin with these samples of the run.
    Returns where what this rank reads is noted: a checksum of its tokens by the batch's first sample."""
    objective, loader = trainer.model_parts.objective, trainer.loader
    factor = [1.0]
    step = trainer.train_step
    seen: dict[int, int] = {}

    def spoiled(batches: Any, **options: Any) -> Any:
        begin = loader.samples - trainer.batch.total
        factor[0] = factors.get(begin, 1.0)
        seen[begin] = zlib.crc32(b"".join(batch["tokens"].numpy().tobytes() for batch in batches))
        return step(batches, **options)

    call = type(objective).__call__

    class Spoiled(type(objective)):  # type: ignore[misc]
        def __call__(self, output: Any, batch: Any) -> Any:
            return call(self, output * factor[0], batch)

    objective.__class__ = Spoiled
    trainer.train_step = spoiled  # type: ignore[assignment]
    return seen


def _run(trainer: Trainer, factors: dict[int, float]) -> dict[str, Any]:
    seen = _spoil(trainer, factors)
    trainer.train()
    lines = []
    if dist.get_rank() == 0:
        text = (trainer.folder / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
    return {
        "losses": {it["step"]: it["loss"] for it in trainer.history if "loss" in it},
        "events": [it for it in trainer.history if "event" in it],
        "lines": lines,
        "tokens": trainer.train_state.tokens,
        "samples": trainer.loader.samples,
        "epoch_samples": trainer.loader.epoch_samples,
        "saved": max(trainer.checkpointer.manager.saved, default=0) if trainer.checkpointer else 0,
        "seen": seen,
        "weights": weights_digest(trainer.model_parts.models[0]),
    }


def _error(trainer: Trainer, factors: dict[int, float]) -> str:
    with pytest.raises(TrainingError) as error:
        _run(trainer, factors)
    return str(error.value)


def _world(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    root = Path(folder, str(dist.get_world_size()))
    for mesh in LAYOUTS[dist.get_world_size()]:
        with in_layout(mesh):
            found[mesh] = _run(_trainer(root / mesh, HEALTH, parallelism=MESHES[mesh]), FACTORS)
    streamed = {"data": {"streaming": True}}
    found["streamed"] = _run(_trainer(root / "streamed", HEALTH, **streamed), FACTORS)
    if dist.get_world_size() == 1:
        rewound = _trainer(root / "fsdp", HEALTH, steps=8, checkpoint={"load_step": 3, "interval": 100})
        found["rewound"] = _run(rewound, {16 * 6: NAN})  # in step 7; the steps 6 and 9 are there
        found["sound"] = _run(_trainer(root / "sound", HEALTH, steps=STEPS + 2, **streamed), {})
        corpus = root / "corpus.txt"
        corpus.write_text("".join(f"{line} {line * line}\n" for line in range(200)))
        epoch = {"dataset_path": str(corpus), "seq_len": 16, "epochs": 1}
        found["epoch"] = _run(_trainer(root / "epoch", HEALTH, training=epoch), {16 * 4: NAN})
        to_end = _trainer(root / "to_end", HEALTH, training=epoch)
        found["to_end"] = _run(to_end, {(to_end.loader.epoch_samples - 1) // 16 * 16: NAN})
    if dist.get_world_size() == 2:
        # The second part begins at the step before the spike, the first ends there.
        _run(_trainer(root / "parts", HEALTH, steps=6), FACTORS)
        found["parts"] = _run(_trainer(root / "parts", HEALTH), FACTORS)
        found["nowhere"] = _error(_trainer(root / "nowhere", HEALTH), {0: NAN})
        always = dict.fromkeys(range(0, 160, 16), NAN)
        found["ended"] = _error(_trainer(root / "ended", {"nan_policy": "skip", "max_skips": 2}), always)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("policies"))
    return {
        f"{mesh}{ranks}": found
        for ranks in LAYOUTS
        for mesh, found in run_world(_world, ranks, folder, timeout=150)[0].items()
    }


def _close(one: dict[int, float], other: dict[int, float]) -> bool:
    pairs = [(one[step], other[step]) for step in one]
    return one.keys() == other.keys() and all(a == pytest.approx(b, rel=1e-5, nan_ok=True) for a, b in pairs)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "tp2", "pp2"])
def test_every_mesh_decides_alike(runs: dict[str, Any], layout: str) -> None:
    """Step 5 rolls back to the checkpoint of step 3, and skips the samples since; step 7 skips its batch."""
    run, reference = runs[layout], runs["fsdp1"]
    back, skipped = run["events"]
    assert (back["event"], back["refused_step"], back["step"], back["samples"]) == (
        "ROLLED BACK",
        5,
        3,
        [48, 80],
    )
    assert (skipped["event"], skipped["step"], skipped["samples"]) == ("SKIPPED", 7, [128, 144])
    assert _close(run["losses"], reference["losses"])
    assert [*run["losses"]] == [*range(1, STEPS + 1)]
    assert max(run["losses"][step] for step in (8, 9, 10)) < run["losses"][1] < 10 < run["losses"][7]
    assert run["samples"] == STEPS * 16 + 32 and run["tokens"] == reference["tokens"]


def test_after_a_rewind_the_checkpoints_of_the_course_before_are_passed_over(runs: dict[str, Any]) -> None:
    [back] = runs["rewound1"]["events"]
    assert (back["refused_step"], back["step"]) == (7, 3)


def test_a_run_that_goes_on_decides_as_it_would_have(runs: dict[str, Any]) -> None:
    """By the losses that the checkpoint remembers: the second part alone has too few."""
    whole, second = runs["fsdp2"], runs["parts2"]
    assert (second["weights"], second["tokens"]) == (whole["weights"], whole["tokens"])
    assert second["events"] == whole["events"][1:]


def test_a_streamed_corpus_goes_on_behind_what_is_skipped(runs: dict[str, Any]) -> None:
    run, sound = runs["streamed1"], runs["sound1"]
    assert [event["samples"] for event in run["events"]] == [[48, 80], [128, 144]]
    assert run["seen"] == sound["seen"] and [*run["seen"]] == [*range(0, (STEPS + 2) * 16, 16)]
    assert runs["streamed2"]["events"][0]["samples"] == [48, 80]
    assert _close(runs["streamed2"]["losses"], run["losses"])


def test_epochs_end_with_their_samples_whatever_was_skipped(runs: dict[str, Any]) -> None:
    """Two batches of an epoch are left out, or all since the last checkpoint: one step more saves then."""
    run, to_end = runs["epoch1"], runs["to_end1"]
    batches = -(-run["epoch_samples"] // 16)
    assert [*run["losses"]] == [*range(1, batches - 1)] and run["saved"] == batches - 2
    assert run["samples"] == batches * 16
    [back] = to_end["events"]
    assert (back["refused_step"], back["samples"][1]) == (batches, batches * 16)
    assert [*to_end["losses"]][-1] == to_end["saved"] == back["step"] + 1


def test_what_happened_is_in_the_metrics(runs: dict[str, Any]) -> None:
    lines = [line for line in runs["pp2"]["lines"]]
    events = {line["event"]: line for line in lines if "event" in line}
    assert "it began in rank 1: its part of the loss (pp 1)" in events["ROLLED BACK"]["reason"]
    assert events["ROLLED BACK"]["refused_loss"] is None
    assert "the gradient norm" in events["SKIPPED"]["reason"] and events["SKIPPED"]["skipped_batches"] == 1
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
    assert lines[lines.index(events["ROLLED BACK"]) + 1]["checkpoint_seconds"] > 0  # no time of its step


def test_too_many_end_the_run(runs: dict[str, Any]) -> None:
    assert "step 3: the loss is nan" in runs["ended2"]
    assert "2 consecutive batches were skipped (health.max_skips)" in runs["ended2"]
    assert "step 1: the loss is nan" in runs["nowhere2"]
    assert "no checkpoint of an earlier step to roll back to" in runs["nowhere2"]


def test_what_stays_high_becomes_usual_and_one_spike_does_not() -> None:
    memory: dict[str, Any] = {}
    guard = Guard(Health(loss_spike_policy="skip", loss_spike_window=8), lambda: memory)
    for number in range(8):
        assert guard.limits() == (FINITE, FINITE) if number < 4 else guard.limits() < (1.2, 1.2)
        guard.accept(1.0 + 0.01 * (number % 2), 1.0)
    guard.reject_spike(100.0, 1.0)
    assert guard.rejected and "the loss 100 is above 1.035, 6 standard deviations" in guard.rejected.reason
    assert guard.limits()[0] < 1.1
    refused = 1
    while guard.limits()[0] < 1.5:
        guard.reject_spike(1.5, 1.0)
        refused += 1
    assert 2 < refused <= guard.options.max_skips
