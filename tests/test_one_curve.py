"""One curve on any mesh: the same run on one process and on several, sharded, replicated, accumulated.

Twenty steps in fp32. Rounding differs between layouts (a batch is summed in another order), and after
twenty updates the difference is about 1e-6; a wrong factor anywhere is at least 1e-2.
"""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.config import Config

STEPS = 20
RELATIVE = 1e-5

MESHES = [(1, 1), (2, 1), (4, 1), (4, 2)]  # (ranks, dp_replicate)
ACCUMULATIONS = (1, 4)
# (ranks, dp_replicate, accumulation, activation checkpointing)
LAYOUTS = [(*mesh, *rest) for mesh in MESHES for rest in product(ACCUMULATIONS, ("none", "full"))]


def _configure(folder: str, ranks: int, replicate: int, accumulation: int, checkpointing: str) -> Config:
    return small_config(
        Path(folder, "run"),
        training={"steps": STEPS, "local_batch_size": 16 // (ranks * accumulation)},
        parallelism={"data_parallel_replicate_degree": replicate},
        activation_checkpoint={"mode": checkpointing},
    )


class _Recorder:
    """Stands between loader and trainer and keeps every row of tokens that passes."""

    def __init__(self, batches: Any):
        self.batches = batches
        self.rows: list[torch.Tensor] = []

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.rows.append(batch["tokens"])
            yield batch


def _samples(recorder: _Recorder, local_rows: int, dp_rank: int) -> list[str]:
    """Digest of every global batch, its rows in the order of the data-parallel ranks."""
    mine = torch.cat(recorder.rows)[: STEPS * local_rows].view(STEPS, local_rows, -1)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (dp_rank, mine))
    whole = torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])], dim=1)
    return [hashlib.sha256(step.numpy().tobytes()).hexdigest() for step in whole]


def _train(folder: str, layout: tuple[int, int, int, str]) -> dict[str, Any]:
    config = _configure(folder, *layout)
    trainer = small_trainer(config)
    weights = weights_digest(trainer.model)
    recorder = _Recorder(trainer.loader)
    trainer.loader = recorder  # type: ignore[assignment]
    trainer.run()
    rows = trainer.batch.total // trainer.mesh.dp_size
    return {
        "weights": weights,
        "samples": _samples(recorder, rows, trainer.mesh.dp_rank),
        "accumulation": trainer.batch.accumulation,
        "losses": [record["loss"] for record in trainer.history],
        "norms": [record["grad_norm"] for record in trainer.history],
    }


def _train_all(folder: str, layouts: list[tuple[int, int, int, str]]) -> list[dict[str, Any]]:
    return [_train(folder, layout) for layout in layouts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int, str], dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("one_curve"))
    results = {}
    for ranks in (1, 2, 4):
        layouts = [layout for layout in LAYOUTS if layout[0] == ranks]
        everywhere = run_world(_train_all, ranks, folder, layouts, timeout=240)
        assert all(result == everywhere[0] for result in everywhere), "ranks log different values"
        results |= dict(zip(layouts, everywhere[0], strict=True))
    return results


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_layout_gives_the_run_of_one_process(runs: dict, layout: tuple[int, int, int, str]) -> None:
    reference, run = runs[LAYOUTS[0]], runs[layout]
    assert run["accumulation"] == layout[2]
    assert run["weights"] == reference["weights"]
    assert run["samples"] == reference["samples"]
    assert len(run["losses"]) == STEPS
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=RELATIVE, atol=0)
    torch.testing.assert_close(run["norms"], reference["norms"], rtol=RELATIVE, atol=0)


def test_the_run_learns_and_sees_new_samples_every_step(runs: dict) -> None:
    reference = runs[LAYOUTS[0]]
    assert len(set(reference["samples"])) == STEPS
    assert reference["losses"][-1] < reference["losses"][0] - 0.5
