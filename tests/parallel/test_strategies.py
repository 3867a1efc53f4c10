"""Each rank holds its share under each strategy, against arithmetic; NO_SHARD against torch's own DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import run_world
from tests.parallel.sharded import (
    BATCH,
    SINGLE,
    STRATEGIES,
    UNTIED,
    Sharding,
    changed,
    fill,
    gathered_bytes,
    gradients,
    groups,
    sharded,
    step,
)
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.models.common.decoder import Decoder
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.fsdp import fsdp_units

RANKS = 4
MIXED = Sharding(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _local_bytes(tensors: Any) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _whole_gradient_bytes(model: nn.Module) -> int:
    """Gradients that wait for the last micro-batch."""
    waiting = [p.unsharded_accumulated_grad for group in groups(model) for p in group.fsdp_params]
    return _local_bytes(gradient for gradient in waiting if gradient is not None)


@contextmanager
def _peak_of_gathered(model: nn.Module) -> Iterator[list[int]]:
    """Records what is gathered each time that a unit has been."""
    seen: list[int] = []
    kind = type(groups(model)[0])
    original = kind.wait_for_unshard

    def recording(group: Any) -> None:
        original(group)
        seen.append(gathered_bytes(model))

    kind.wait_for_unshard = recording
    try:
        yield seen
    finally:
        kind.wait_for_unshard = original


def _measure(name: str) -> dict[str, int]:
    replicate, reshard = STRATEGIES[name]
    how = changed(MIXED, fsdp_reshard_after_forward=reshard, fsdp_sync_each_batch=False)
    model = sharded(UNTIED, how, replicate=replicate, dtype=torch.float32)
    optimizer = build_optimizer(
        model.named_parameters(), Config(optimizer=Optimizer(lr=1e-3, weight_decay=0))
    )
    found: dict[str, int] = {"stored before": gathered_bytes(model)}
    forwards: list[int] = []
    between: list[int] = []

    def after_forward() -> None:
        forwards.append(gathered_bytes(model))
        between.append(_whole_gradient_bytes(model))

    with _peak_of_gathered(model) as seen:
        step(model, how, accumulation=2, after_forward=after_forward)
    found["after forward"], found["peak"] = forwards[-1], max(seen)
    found["whole gradients in the last micro-batch"] = between[-1]
    found["gathered after the step"], found["whole after the step"] = (
        gathered_bytes(model),
        _whole_gradient_bytes(model),
    )
    optimizer.step()
    parameters = list(model.parameters())
    found["parameters"] = _local_bytes(parameters)
    found["gradients"] = _local_bytes([parameter.grad for parameter in parameters])
    state = optimizer_tensors(model.named_parameters(), optimizer)
    found["moments"] = _local_bytes(tensor for key, tensor in state.items() if not key.endswith(".step"))
    return found


def _bytes_world() -> dict[str, dict[str, int]]:
    return {name: _measure(name) for name in STRATEGIES}


def _expected(name: str, rank: int) -> dict[str, int]:
    """Bytes of a rank: fp32 (4) is stored and reduced, bf16 (2) is gathered, Adam has two moments."""
    replicate, reshard = STRATEGIES[name]
    shards = RANKS // replicate
    place = rank % shards
    with torch.device("meta"):
        model = Decoder(UNTIED)
    stored = whole = 0
    units: list[int] = []
    for unit in fsdp_units(model):
        gathered = 0
        for parameter in (parameter for module in unit for parameter in module.parameters()):
            rows, width = parameter.shape[0], parameter.numel() // parameter.shape[0]
            part = -(-rows // shards)  # all but the last ranks have this many rows
            stored += max(0, min(part, rows - place * part)) * width
            whole += rows * width
            gathered += part * shards * width
        units.append(2 * gathered)
    keeps = reshard == "never"
    return {
        "stored before": 0,
        "after forward": sum(units) if keeps else units[-1],
        "peak": sum(units) if keeps else max(units),
        "whole gradients in the last micro-batch": 4 * whole,
        "gathered after the step": 0,
        "whole after the step": 0,
        "parameters": 4 * stored,
        "gradients": 4 * stored,
        "moments": 8 * stored,
    }


@pytest.fixture(scope="module")
def measured() -> list[dict[str, dict[str, int]]]:
    return run_world(_bytes_world, RANKS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_rank_holds_what_its_strategy_says(measured: list[dict[str, dict[str, int]]], name: str) -> None:
    for rank, found in enumerate(measured):
        assert found[name] == _expected(name, rank), f"rank {rank}"


def test_strategies_differ_where_they_should() -> None:
    full, zero2, replicas = (_expected(name, 0) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    assert full["parameters"] < replicas["parameters"] / 3.9
    assert full["peak"] < zero2["peak"] / 2 and full["parameters"] == zero2["parameters"]


def _differ_from_ddp() -> list[str]:
    """Names of the gradients that are not DDP's, bit for bit."""
    model = sharded(UNTIED, SINGLE, replicate=2, dtype=torch.float32)
    step(model, SINGLE)
    plain = fill(Decoder(UNTIED))
    tokens, labels = (part.chunk(2)[dist.get_rank()] for part in BATCH)
    replicated = DistributedDataParallel(plain)  # its reducer lives as long as it does
    replicated(tokens, labels=labels).backward()
    averaged, summed = gradients(plain), gradients(model)
    return [name for name, gradient in averaged.items() if not torch.equal(2 * gradient, summed[name])]


def test_no_sharding_has_the_gradients_of_ddp() -> None:
    # DDP averages where FSDP sums. Of two ranks there is one order to add in, and halving and doubling
    # are exact, so that nothing is left to tolerate.
    assert run_world(_differ_from_ddp, 2) == [[], []]
