"""A run on one GPU leaves out of FSDP what it would copy in vain, and computes the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.curves import few_tokens
from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.parallel import fsdp

SIZES = {"seq_len": 32, "global_batch_size": 8, "local_batch_size": 8}
BF16 = {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}
# Tables, and whether all parameters, some or none are left out.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "all"),
    "bf16, accumulated": ({"training": BF16 | {"local_batch_size": 4}}, "all"),
    "bf16 in backward": (
        {
            "training": BF16 | {"max_norm": float("inf")},
            "optimizer": {"early_step_in_backward": True},
        },
        "all",
    ),
    "bf16 of fp32": ({"training": {"mixed_precision_param": "bfloat16"}}, "none"),
    "reduced once": (
        {"training": {"local_batch_size": 4}, "parallelism": {"fsdp_sync_each_batch": False}},
        "none",
    ),
    "offload": ({"training": {"enable_cpu_offload": True}}, "none"),
    "lora": (
        {"training": {"mixed_precision_param": "bfloat16"}, "finetune": {"adapter": "lora"}},
        "some",
    ),
    "checkpointed": ({"activation_checkpoint": {"mode": "full"}}, "all"),
    "tied": ({"model": {"tie_embeddings": True}}, "all"),
}


def _run(folder: Path, tables: dict[str, Any], skip: bool, steps: int) -> tuple[list[Any], str, str]:
    tables = {
        **tables,
        "model": few_tokens(folder.parent) | tables.get("model", {}),
        "training": SIZES | tables.get("training", {}) | {"steps": steps},
        "parallelism": tables.get("parallelism", {}) | {"fsdp_skip_on_one_rank": skip},
        "checkpoint": {"enable": True, "interval": 2, "async_mode": "disabled"},
        "lr_scheduler": {"warmup_steps": 0, "decay_type": "constant"},
    }
    trainer = small_trainer(small_config(folder, **tables))
    trainer.train()
    out = [not isinstance(parameter, DTensor) for _, parameter in trainer.model_parts.named_parameters()]
    left_out = "all" if all(out) else "some" if any(out) else "none"
    numbers = [(record["loss"], record["grad_norm"]) for record in trainer.history if "loss" in record]
    return numbers, weights_digest(trainer.model_parts.models[0]), left_out


def _world(folder: str) -> dict[str, list[Any]]:
    fsdp.SKIP_DEVICES = ("cpu",)  # which stands for a GPU
    found = {}
    for name, (tables, _) in CASES.items():
        runs = [_run(Path(folder, f"{name} whole"), tables, False, 4)]
        for first, then in ((True, False), (False, True)):
            path = Path(folder, f"{name} {first}")
            runs += [_run(path, tables, first, 2), _run(path, tables, then, 4)]
        found[name] = runs
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_world(_world, 1, str(tmp_path_factory.mktemp("one_rank")), timeout=300)[0]


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_the_same_to_the_bit(world: dict[str, list[Any]], name: str) -> None:
    (numbers, weights, out), *halves = world[name]
    left_out = CASES[name][1]
    assert [it[2] for it in halves] == [left_out, "none", "none", left_out] and out == "none"
    for first, then in (halves[:2], halves[2:]):
        assert [*first[0], *then[0]] == numbers and then[1] == weights
