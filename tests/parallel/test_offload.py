"""Parameters, gradients and moments on the host change nothing, whatever the model is split over.

The CPU stands for the device as well, so that this shows the order of things and not their places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.parallel.sharded import groups
from tests.training import small_config, small_trainer, weights_digest

PP = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_microbatch_size": 2,
    **{f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")},
}
MESHES: dict[str, dict[str, Any]] = {
    "tp cp": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "pp": PP | {"pipeline_parallel_schedule": "1F1B"},
}
if SINCE_2_13:
    kept = {"fsdp_reshard_after_forward": "never"}
    MESHES["pp v-shaped"] = PP | kept | {"pipeline_parallel_schedule": "ZBVZeroBubble"}
MAX_NORM = 0.1


def _run(folder: Path, mesh: str, offload: bool) -> dict[str, Any]:
    trainer = small_trainer(
        small_config(
            folder / f"{mesh} {offload}",
            model={"vocab_size": 4104, "dim": 32, "n_layers": 4, "ffn_dim": 48, "tie_embeddings": True},
            training={
                "steps": 2,
                "seq_len": 32,
                "local_batch_size": 4,
                "max_norm": MAX_NORM,
                "enable_cpu_offload": offload,
            },
            validation={"enable": True, "seq_len": 16, "samples": 10, "freq": 1},
            checkpoint={"enable": True, "interval": 2},
            parallelism=MESHES[mesh],
        )
    )
    trainer.train()
    models = trainer.model_parts.models
    policies = [group.offload_policy for model in models for group in groups(model)]
    return {
        "offloaded": {isinstance(policy, CPUOffloadPolicy) for policy in policies},
        "history": [
            {name: record.get(name) for name in ("step", "loss", "grad_norm", "validation_loss")}
            for record in trainer.history
        ],
        "weights": [weights_digest(model) for model in models],
    }


def _world(folder: str) -> dict[str, Any]:
    return {mesh: [_run(Path(folder), mesh, offload) for offload in (False, True)] for mesh in MESHES}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_world, 4, str(tmp_path_factory.mktemp("offload")), timeout=170)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_offloaded_run_is_the_same_to_the_bit(world: list[dict[str, Any]], mesh: str) -> None:
    for plain, offloaded in (rank[mesh] for rank in world):
        assert plain.pop("offloaded") == {False} and offloaded.pop("offloaded") == {True}
        assert offloaded == plain
        norms = [record["grad_norm"] for record in plain["history"] if record["grad_norm"]]
        assert len(norms) == 2 and min(norms) > MAX_NORM  # clipping had something to do
