"""A step waits for the device once, for the few numbers that decide if it counts, and once for each exchange
of experts' rows, and computes nothing by way of DTensor, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import in_layout, run_world
from tests.host_waits import HostWaits
from tests.meshes import SINCE_2_12
from tests.training import small_config, small_trainer
from toolkit.config import Config

CLIPPED = {"max_norm": 1e-3, "local_batch_size": 4}  # four micro-batches on one rank, two on two
PARALLEL: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    "reduced once": {"fsdp_sync_each_batch": False, "fsdp_reshard_after_forward": "never"},
}
BY_OPERATOR = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
LORA = {"finetune": {"adapter": "lora", "lora": {"dropout": 0.1}}}
EXPERTS = {"model": {"name": "deepseek_v3", "n_kv_heads": 8}, "moe": {"aux_loss_coeff": 1e-2}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "plain": {},
        "checkpointed": {"activation_checkpoint": {"mode": "full"}},
        "by operator": BY_OPERATOR,
        "chunks of loss": {"training": {"loss_chunk_tokens": 100}},
        "lora": LORA,
        "nf4": {
            "model": {"ffn_dim": 192},  # in blocks of 64
            "finetune": {"adapter": "lora", "lora": {"quantize_base": "nf4"}},
        },
        "in backward": {
            "training": {"max_norm": float("inf"), "local_batch_size": 16},
            "optimizer": {"early_step_in_backward": True},
        },
        "experts": EXPERTS,
    },
    2: {
        "fsdp": {},
        **{name: {"parallelism": options} for name, options in PARALLEL.items()},
        "tp by operator": {"parallelism": PARALLEL["tp"], **BY_OPERATOR},
        "pp lora": {"parallelism": PARALLEL["pp"], **LORA},
        "fsdp experts": EXPERTS,
        "expert parallelism": EXPERTS | {"parallelism": {"expert_parallel_degree": 2}},
    },
}
if not SINCE_2_12:
    del LAYOUTS[1]["nf4"]


def _config(folder: Path, tables: dict[str, Any]) -> Config:
    return small_config(
        folder,
        model={"attention": "sdpa", "n_layers": 4} | tables.get("model", {}),
        training={"cpu_fast_paths": False} | CLIPPED | tables.get("training", {}),  # which a GPU has not
        parallelism=tables.get("parallelism", {}),
        **{name: table for name, table in tables.items() if name not in ("model", "training", "parallelism")},
    )


Found = tuple[list[tuple[str, str]], set[str]]
"""Waits of a step, and its operators of DTensor."""


def _waits(folder: Path, tables: dict[str, Any]) -> Found:
    """Those of a second step: the first makes what later ones have, such as the optimizer's state."""
    trainer = small_trainer(_config(folder, tables))
    batches = iter(trainer.loader)
    waits = HostWaits()
    for number in range(2):
        micro_batches = list(islice(batches, trainer.batch.accumulation))
        if number == 0:
            trainer.train_step(micro_batches, learning_rate=1e-3)
            continue
        with waits:
            result = trainer.train_step(micro_batches, learning_rate=1e-3)
        assert result.grad_norm > trainer.train_step.max_norm or tables.get("optimizer")
    return waits.found, waits.on_dtensors


def _all(folder: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Found]:
    found = {}
    for name, tables in layouts.items():
        with in_layout(name):
            found[name] = _waits(Path(folder, name), tables)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    every: dict[str, list[Any]] = {}
    for ranks, layouts in LAYOUTS.items():
        world = run_world(_all, ranks, str(tmp_path_factory.mktemp(str(ranks))), layouts)
        every |= {name: [rank[name] for rank in world] for name in layouts}
    return every


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_a_step_waits_for_the_device_once(found: dict[str, list[Any]], layout: str) -> None:
    ahead = "toolkit/optim/update_ahead.py wait"  # the update is queued before it, as on a GPU
    place = "toolkit/train_step.py _read" if layout == "in backward" else ahead
    # Two micro-batches, each of which counts choices first, through three layers of experts: row counts.
    exchanged = 2 * 2 * 3 if layout == "expert parallelism" else 0
    for waits, _ in found[layout]:
        counted = exchanged * [("tolist", "toolkit/parallel/expert_parallel.py _row_counts")]
        assert waits == [*counted, ("tolist", place)]


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_no_operator_of_a_step_is_worked_out_by_dtensor(found: dict[str, list[Any]], layout: str) -> None:
    for _, on_dtensors in found[layout]:
        assert on_dtensors <= {"detach"}  # where autograd keeps a gradient


def _indexed(x: Tensor) -> object:
    x[x > 0] = 1
    return x[x > 0]


READS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "item": (lambda x: x.sum().item(), ["_local_scalar_dense"]),
    "bool": (lambda x: bool(x.sum() > 0), ["_local_scalar_dense"]),
    "float": (lambda x: float(x[0]), ["_local_scalar_dense"]),
    "tolist": (lambda x: x.tolist(), ["tolist"]),
    "cpu": (lambda x: x.cpu(), ["cpu"]),
    "numpy": (lambda x: x.numpy(), ["numpy"]),
    "nonzero": (lambda x: x.nonzero(), ["nonzero"]),
    "masks": (_indexed, ["index_put_", "index"]),
    "masked_select": (lambda x: x.masked_select(x > 0), ["masked_select"]),
    "repeats": (lambda x: x.repeat_interleave(x.long()), ["repeat_interleave"]),
    "equal": (lambda x: torch.equal(x, x), ["equal"]),
    "tensor": (lambda x: torch.tensor(3, device=x.device), ["tensor"]),
    "in backward": (lambda x: _reads_in_backward(x), ["_local_scalar_dense"]),
    "nothing": (lambda x: x[torch.arange(2)].repeat_interleave(2, dim=0) + torch.full((), 3), []),
}


def _reads_in_backward(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    leaf.register_hook(lambda gradient: gradient * gradient.sum().item())
    leaf.square().sum().backward()


@pytest.mark.parametrize("how", READS)
def test_each_way_to_wait_is_seen(how: str) -> None:
    read, expected = READS[how]
    with HostWaits() as waits:
        read(torch.ones(3))
    assert [name for name, _ in waits.found] == expected
