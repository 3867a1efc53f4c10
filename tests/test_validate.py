"""Validation between training steps: the same loss on every mesh, and no trace in the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.training import small_config, small_trainer, weights_digest
from toolkit.checkpoint.manifest import committed_steps


def _run(folder: Path, *, steps: int, validate: bool, reshard: str = "default") -> Any:
    trainer = small_trainer(
        small_config(
            folder,
            training={"steps": steps, "mixed_precision_param": "bfloat16"},
            lr_scheduler={"warmup_steps": 2, "total_steps": 4},
            validation={"enable": validate, "freq": 2, "steps": 1, "seq_len": 64},
            checkpoint={"enable": True, "interval": 2},
            parallelism={"fsdp_reshard_after_forward": reshard},
        )
    )
    trainer.train()
    return trainer


def _saved_beside_validation(folder: str) -> list[tuple[bool, str, str]]:
    """After validation: whether all parameters are fp32 shards; the weights, and those of a plain run."""
    found = []
    plain = _run(Path(folder, "plain"), steps=4, validate=False)
    for reshard in ("default", "never"):
        _run(Path(folder, f"validated-{reshard}"), steps=2, validate=True, reshard=reshard)
        resumed = _run(Path(folder, f"validated-{reshard}"), steps=4, validate=True, reshard=reshard)
        assert resumed.history[0]["step"] == 3
        shards = all(
            isinstance(parameter, DTensor) and parameter.dtype == torch.float32
            for parameter in resumed.model_parts.models[0].parameters()
        )
        found.append(
            (
                shards,
                weights_digest(resumed.model_parts.models[0]),
                weights_digest(plain.model_parts.models[0]),
            )
        )
    return found


def test_a_checkpoint_saved_beside_a_validation_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    for found in run_world(_saved_beside_validation, 2, str(tmp_path)):
        for shards, validated, plain in found:
            assert shards and validated == plain


def _stopped_in_validation(folder: str) -> tuple[int, int, bool, list[int]]:
    """A run whose last rank gets SIGTERM in the second of many batches of its first validation."""
    trainer = small_trainer(
        small_config(
            folder,
            training={"steps": 6},
            validation={"enable": True, "freq": 2, "steps": -1, "seq_len": 64, "local_batch_size": 1},
            checkpoint={"enable": True, "interval": 100},
        )
    )
    losses, loss = 0, trainer.model_parts.loss

    def counted(batch: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        if losses == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(batch)

    trainer.model_parts.loss = counted  # type: ignore[method-assign]
    code = trainer.train()
    validated = any("validation_loss" in record for record in trainer.history)
    return code, losses, validated, committed_steps(Path(folder, "checkpoint"))


def test_a_signal_in_a_validation_does_not_wait_for_its_end(tmp_path: Path) -> None:
    for code, losses, validated, steps in run_world(_stopped_in_validation, 2, str(tmp_path)):
        assert (code, losses, validated, steps) == (75, 2, False, [2])


def _pipeline(schedule: str, **more: Any) -> dict[str, Any]:
    ends = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    sizes = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2, **ends}
    return {"pipeline_parallel_schedule": schedule, **sizes, **more}


# Of four ranks; data parallelism takes what the others leave.
MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp cp": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "pp tp": _pipeline("Interleaved1F1B", tensor_parallel_degree=2),
}
if SINCE_2_13:
    kept = {"fsdp_reshard_after_forward": "never"}
    MESHES["pp v-shaped"] = _pipeline("ZBVZeroBubble", **kept)


def _losses(folder: Path, parallelism: dict[str, Any], *, validated: bool) -> tuple[list[float], list[float]]:
    """Losses of training and of validation, at another batch shape than training's; all in fp64."""
    dtype = "float64"
    precision = {"dtype": dtype, "mixed_precision_param": dtype, "mixed_precision_reduce": dtype}
    trainer = small_trainer(
        small_config(
            folder,
            model={"vocab_size": 4104, "dim": 32, "n_layers": 4, "ffn_dim": 48, "tie_embeddings": True},
            training={"steps": 2, "seq_len": 32, "local_batch_size": 4, **precision},
            # 3 rows a micro-batch divide neither the 13 samples nor training's batch.
            validation={
                "enable": validated,
                "freq": 1,
                "seq_len": 48,
                "local_batch_size": 3,
                "samples": 13,
            },
            parallelism=parallelism,
        )
    )
    trainer.train()
    training = [record["loss"] for record in trainer.history if "loss" in record]
    return training, [record["validation_loss"] for record in trainer.history if "loss" not in record]


def _on_meshes(folder: str, meshes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        mesh: [
            _losses(Path(folder, f"{mesh} {validated}"), parallelism, validated=validated)
            for validated in (True, False)
        ]
        for mesh, parallelism in meshes.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("validate"))


@pytest.fixture(scope="module")
def one(folder: str) -> list[float]:
    return run_world(_on_meshes, 1, folder, {"one": {}})[0]["one"][0][1]


@pytest.fixture(scope="module")
def world(folder: str) -> list[dict[str, Any]]:
    return run_world(_on_meshes, 4, folder, MESHES, timeout=170)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_has_the_validation_loss_of_one_process(
    world: list[dict[str, Any]], one: list[float], mesh: str
) -> None:
    assert len(one) == 2
    for rank in world:
        (_, validation), _ = rank[mesh]
        assert validation == pytest.approx(one, rel=1e-10)  # fp64, an update in another order of sums


@pytest.mark.parametrize("mesh", MESHES)
def test_validation_does_not_disturb_training(world: list[dict[str, Any]], mesh: str) -> None:
    for rank in world:
        (training, validation), (undisturbed, none) = rank[mesh]
        assert len(validation) == 2 and not none
        assert training == undisturbed
