"""Validation between training steps leaves no trace in the model, the optimizer or a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest


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
    trainer.run()
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
            for parameter in resumed.execution.models[0].parameters()
        )
        found.append(
            (shards, weights_digest(resumed.execution.models[0]), weights_digest(plain.execution.models[0]))
        )
    return found


def test_a_checkpoint_saved_beside_a_validation_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    for found in run_world(_saved_beside_validation, 2, str(tmp_path)):
        for shards, validated, plain in found:
            assert shards and validated == plain
