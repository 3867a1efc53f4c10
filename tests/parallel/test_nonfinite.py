"""A value that is not finite is told of the rank, module and micro-batch where it began, on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.errors import TrainingError

PARAMETER = "layers.0.attention.wk.weight"
CASES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    # name: (parallelism, rank, module, what is told)
    "data": (
        {},
        2,
        "layers.1.feed_forward.w1",
        "layers.1.feed_forward.w1 on rank 2 (dp_shard 2), micro-batch 1",
    ),
    "tensor": (
        {"tensor_parallel_degree": 2},
        3,
        "layers.0.attention.wq",
        "layers.0.attention.wq on rank 3 (dp_shard 1, tp 1), micro-batch 1",
    ),
    "pipeline": (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
        1,
        "layers.0.feed_forward.w2",
        "layers.0.feed_forward.w2 on rank 1 (dp_shard 1, pp 0), micro-batch 1",
    ),
}


def _message(folder: Path, parallelism: dict[str, Any], sabotage: Any) -> str:
    training = {"steps": 2, "global_batch_size": 16, "local_batch_size": 2}
    trainer = small_trainer(small_config(folder, training=training, parallelism=parallelism))
    sabotage(trainer.model_parts)
    with pytest.raises(TrainingError) as error:
        trainer.train()
    return str(error.value)


def _in_module(rank: int, name: str) -> Any:
    def sabotage(model_parts: Any) -> None:
        if dist.get_rank() == rank:
            module = model_parts.models[0].get_submodule(name)
            module.register_forward_hook(lambda module, args, output: output * torch.nan)

    return sabotage


def _in_parameter(model_parts: Any) -> None:
    if dist.get_rank() == 1:
        dict(model_parts.named_parameters())[PARAMETER].data._local_tensor[0, 0] = torch.nan


def _once(model_parts: Any) -> None:
    """In the loss of one rank, and never again."""
    if dist.get_rank() == 1:
        backward = model_parts.backward
        model_parts.backward = lambda *arguments: backward(*arguments) * torch.nan


def _world(folder: str) -> dict[str, str]:
    told = {
        name: _message(Path(folder, name), parallelism, _in_module(rank, module))
        for name, (parallelism, rank, module, _) in CASES.items()
    }
    told["parameter"] = _message(Path(folder, "parameter"), {}, _in_parameter)
    told["once"] = _message(Path(folder, "once"), {}, _once)
    return told


def test_what_is_not_finite_is_told_of_where_it_began(tmp_path: Path) -> None:
    for told in run_world(_world, 4, str(tmp_path)):
        for name, (*_, expected) in CASES.items():
            assert f"it began in {expected}\n" in told[name]
        assert f"it began in the parameter {PARAMETER} on rank 1 (dp_shard 1)\n" in told["parameter"]
        assert "it began in rank 1: its part of the loss (dp_shard 1)\n" in told["once"]
