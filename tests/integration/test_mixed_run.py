"""A run on a mixture is the same run on one rank and on two, and after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers import run_world
from tests.training import small_config, small_trainer

STEPS = 8
STOP = 3


def _train(folder: str, name: str, steps: int) -> dict[str, Any]:
    """Train on prose and digits, whose losses are far apart, and return what was logged."""
    config = small_config(
        Path(folder, name),
        training={"dataset": "c4_test", "steps": steps, "local_batch_size": 4},
        lr_scheduler={"warmup_steps": 2, "total_steps": STEPS},
        checkpoint={"enable": True},
        data={
            "cache_folder": f"{folder}/cache",
            "mixture": {
                "prose": {"weight": 3, "dataset": "embedded_validation"},
                "digits": {"weight": 1, "dataset_path": f"{folder}/digits.txt"},
            },
        },
    )
    trainer = small_trainer(config)
    trainer.train()
    assert trainer.loader.mixture is not None
    return {
        "losses": [record["loss"] for record in trainer.history],
        "norms": [record["grad_norm"] for record in trainer.history],
        "epoch": trainer.steps_an_epoch * trainer.batch.total,
        "samples": sum(trainer.loader.mixture.lengths),
        "state": trainer.loader.state_dict(),
    }


def _train_all(folder: str, runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [_train(folder, *run) for run in runs]


def test_the_same_run_on_one_rank_and_on_two_and_after_a_resume(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "digits.txt").write_text("\n".join(str(number**3) for number in range(4000)))
    ((whole, begun),) = run_world(_train_all, 1, folder, [("whole", STEPS), ("resumed", STOP)])
    (two, resumed), others = run_world(_train_all, 2, folder, [("two", STEPS), ("resumed", STEPS)])
    assert others == [two, resumed], "ranks log different values"
    assert len(whole["losses"]) == STEPS and whole["epoch"] == whole["samples"]
    assert whole["state"] == two["state"] == resumed["state"]
    for name in ("losses", "norms"):
        # Rounding differs between one rank and two, as in test_one_curve.
        torch.testing.assert_close(two[name], whole[name], rtol=1e-5, atol=0)
        torch.testing.assert_close(begun[name] + resumed[name], whole[name], rtol=1e-5, atol=0)
