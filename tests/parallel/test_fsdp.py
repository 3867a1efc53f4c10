"""FSDP's options: each leaves the gradients as they are, and does what it says.

fp64: what is left is the order of sums, some 1e-15.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.helpers import run_world
from tests.models.small_llama import small
from tests.parallel.sharded import (
    BATCH,
    EXACT,
    FULL,
    KEEP_ALL,
    SINGLE,
    TIED,
    UNTIED,
    Collectives,
    changed,
    furthest,
    gathered_bytes,
    gradients,
    groups,
    plain_gradients,
    sharded,
    step,
)
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.config.parallelism import ActivationCheckpoint
from toolkit.optim.grad_clip import clip_, global_norm
from toolkit.optim.optimizer import build_optimizer
from toolkit.parallel import fsdp
from toolkit.parallel.fsdp import NoReduceScatter, begin_micro_batch

# name: (model, sharding, activation checkpointing, accumulation)
CASES: dict[str, tuple[Any, ...]] = {
    "prefetch": (UNTIED, changed(EXACT, fsdp_forward_prefetch=1, fsdp_backward_prefetch=2), KEEP_ALL, 2),
    "prefetch beyond": (TIED, changed(EXACT, fsdp_forward_prefetch=9, fsdp_backward_prefetch=9), FULL, 1),
    "reshard to 2": (TIED, changed(EXACT, fsdp_reshard_after_forward=2), FULL, 2),
    "always": (UNTIED, changed(EXACT, fsdp_reshard_after_forward="always"), KEEP_ALL, 1),
    "blocks by class": (UNTIED, changed(EXACT, fsdp_wrap_policy="class"), FULL, 1),
    "linears by size": (
        TIED, changed(EXACT, fsdp_wrap_policy="size", fsdp_min_num_params=16_384), KEEP_ALL, 2
    ),
    "norms by class, by operator": (
        UNTIED,
        changed(EXACT, fsdp_wrap_policy="class", fsdp_wrap_classes=["RMSNorm"]),
        ActivationCheckpoint(mode="selective", selective_ac_option="op"),
        1,
    ),
    "offload": (UNTIED, replace(EXACT, cpu_offload=True), KEEP_ALL, 2),
    "offload, whole gradients": (
        TIED,
        changed(
            replace(EXACT, cpu_offload=True), fsdp_sync_each_batch=False, fsdp_reshard_after_forward="never"
        ),
        FULL,
        3,
    ),
}  # fmt: skip


def _gradients_of_cases() -> dict[str, float]:
    expected = {args: plain_gradients(args) for args in (UNTIED, TIED)}
    found = {}
    for name, (args, how, checkpointing, accumulation) in CASES.items():
        model = sharded(args, how, checkpointing=checkpointing)
        step(model, how, accumulation)
        found[name] = furthest(gradients(model), expected[args])
    return found


def _precisions() -> dict[str, Any]:
    """Run one model in bf16: what comes out with and without fp32 logits, and how reductions differ."""
    mixed = replace(SINGLE, param_dtype=torch.bfloat16)
    tokens, labels = BATCH
    outputs = {}
    for name, output in (("auto", None), ("float32", torch.float32)):
        model = sharded(UNTIED, replace(mixed, output_dtype=output), dtype=torch.float32)
        inside: list[torch.dtype] = []
        model.norm.register_forward_hook(lambda module, given, out, seen=inside: seen.append(out.dtype))
        with torch.no_grad():
            outputs[name] = model(tokens), model(tokens, labels=labels), inside[0]
    stage = sharded(UNTIED, replace(mixed, output_dtype=torch.float32), dtype=torch.float32, headless=True)
    with torch.no_grad():
        handed_on = stage(tokens).dtype
    summed = {}
    for name, how in (
        ("each", mixed),
        ("once", changed(mixed, fsdp_sync_each_batch=False)),
        ("rounded", replace(mixed, reduce_dtype=torch.bfloat16)),
    ):
        model = sharded(UNTIED, how, dtype=torch.float32)
        step(model, how, accumulation=3)
        summed[name] = gradients(model)
    return {
        "dtypes": {name: (logits.dtype, loss.dtype, h) for name, (logits, loss, h) in outputs.items()},
        "handed on": handed_on,
        "losses": [loss.item() for _, loss, _ in outputs.values()],
        "same logits": torch.equal(outputs["auto"][0].float(), outputs["float32"][0]),
        "once": furthest(summed["once"], summed["each"]),
        "rounded": furthest(summed["rounded"], summed["each"]),
    }


def _offloaded_update() -> tuple[bool, bool, float]:
    """Say if shards are offloaded, without page-locking, and how far an update is from the plain one."""
    updated = []
    for offload in (False, True):
        how = replace(EXACT, cpu_offload=offload)
        model = sharded(UNTIED, how)
        optimizer = build_optimizer(
            model.named_parameters(), Config(optimizer=Optimizer(lr=1e-2, weight_decay=0.1))
        )
        for _ in range(2):
            step(model, how)
            parameters = list(model.parameters())
            clip_(parameters, 1.0, global_norm(parameters).item())
            optimizer.step()
            optimizer.zero_grad()
        updated.append({name: parameter.full_tensor() for name, parameter in model.named_parameters()})
    policies = [group.offload_policy for group in groups(model)]
    offloaded = all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
    return offloaded, any(policy.pin_memory for policy in policies), furthest(updated[1], updated[0])


def _kept_between_micro_batches() -> list[tuple[int, bool]]:
    """Under "never": bytes gathered, and whether shards are in place, after each of two micro-batches
    and after a forward without gradients that follows."""
    how = changed(EXACT, fsdp_reshard_after_forward="never")
    model = sharded(UNTIED, how)
    tokens, labels = BATCH
    seen = []
    for last in (False, True):
        begin_micro_batch(model, how.options, last=last)
        model(tokens, labels=labels).backward()
        seen.append((gathered_bytes(model), all(group.is_sharded for group in groups(model))))
    return seen


def _reshard_sizes() -> tuple[list[int | None], Collectives]:
    how = changed(EXACT, fsdp_reshard_after_forward=2)
    model = sharded(UNTIED, how)
    sizes = [
        group.post_forward_mesh_info.shard_mesh_size if group.post_forward_mesh_info else None
        for group in groups(model)
    ]
    with Collectives() as sent:
        step(model, how)
    return sizes, dict(sent.counts)


DEEP = small("llama3.1", n_layers=4)
UNITS = ["tok_embeddings", *(f"layers.{index}" for index in range(4)), "norm, output"]
# name: (depth in forward, in backward, activation checkpointing)
DEPTHS = {
    "torch's own": (0, 1, KEEP_ALL),
    "one": (1, 1, KEEP_ALL),
    "two": (2, 2, KEEP_ALL),
    "one, checkpointed": (1, 1, FULL),
}


def _asked_before(forward: int, backward: int, checkpointing: ActivationCheckpoint) -> list[dict[str, list]]:
    """For each unit of a step's forward, and then of its backward, those that were asked for when it was
    done."""
    depths = {"fsdp_forward_prefetch": forward, "fsdp_backward_prefetch": backward}
    how = changed(EXACT, fsdp_reshard_after_forward="always", **depths)
    model = sharded(DEEP, how, checkpointing=checkpointing)
    kind: Any = type(groups(model)[0])
    asked: list[str] = []
    done: list[dict[str, list]] = [{}, {}]

    def unshard(group: Any, *args: Any, **options: Any) -> None:
        before = group._all_gather_result
        kind_unshard(group, *args, **options)
        if group._all_gather_result is not before:
            asked.append(group._module_fqn)

    def post_forward(group: Any, *args: Any) -> Any:
        if group._module_fqn not in done[0]:  # and not the one that is computed again
            done[0][group._module_fqn] = list(asked)
        return kind_post_forward(group, *args)

    def post_backward(group: Any, *args: Any) -> None:
        done[1].setdefault(group._module_fqn, list(asked))
        kind_post_backward(group, *args)

    kind_unshard, kind_post_forward, kind_post_backward = kind.unshard, kind.post_forward, kind.post_backward
    with patch.multiple(kind, unshard=unshard, post_forward=post_forward, post_backward=post_backward):
        step(model, how, after_forward=asked.clear)
    return done


def _world() -> dict[str, Any]:
    return {
        "asked": {name: _asked_before(*depths) for name, depths in DEPTHS.items()},
        "gradients": _gradients_of_cases(),
        "precisions": _precisions(),
        "offload": _offloaded_update(),
        "kept": _kept_between_micro_batches(),
        "sizes": _reshard_sizes(),
    }


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run_world(_world, 4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(world: list[dict[str, Any]], name: str) -> None:
    for found in world:
        assert found["gradients"][name] < 1e-12


def test_logits_come_out_in_the_output_precision_and_the_loss_is_never_rounded(
    world: list[dict[str, Any]],
) -> None:
    low, single = torch.bfloat16, torch.float32
    for found in world:
        # Cast on the way out of the root: inside, all stays as it was.
        assert found["precisions"]["dtypes"] == {"auto": (low, single, low), "float32": (single, single, low)}
        assert found["precisions"]["handed on"] == low  # the next stage's buffers are of it
        assert found["precisions"]["same logits"]
        one, other = found["precisions"]["losses"]
        assert one == other != torch.tensor(one).bfloat16().item()


def test_gradients_are_summed_in_the_reduce_precision(world: list[dict[str, Any]]) -> None:
    # bf16 keeps 8 bits: a gradient that was added up in it is 2^-9 off for each of the four ranks and
    # three micro-batches, at most; one that was added up in fp32 is not off by a hundredth of one.
    ulp = 2.0**-9
    for found in world:
        assert found["precisions"]["once"] < ulp / 100
        assert ulp / 10 < found["precisions"]["rounded"] < 12 * ulp


def test_offloaded_shards_are_updated_alike(world: list[dict[str, Any]]) -> None:
    assert [found["offload"] for found in world] == [(True, False, 0.0)] * 4


def test_what_is_kept_for_backward_is_kept_for_the_next_micro_batch_alone(
    world: list[dict[str, Any]],
) -> None:
    for found in world:
        (between, sharded_between), (after, sharded_after) = found["kept"]
        assert between > 0 and not sharded_between
        assert after == 0 and sharded_after


def test_a_number_keeps_parameters_sharded_over_so_many_ranks(world: list[dict[str, Any]]) -> None:
    for found in world:
        sizes, counts = found["sizes"]
        # Embedding and blocks; the last unit is kept whole.
        assert sizes == [2, 2, 2, None]
        assert counts == {"allgather": 6, "reduce_scatter": 4}


@pytest.mark.parametrize("name", DEPTHS)
def test_units_are_asked_for_while_those_before_compute(world: list[dict[str, Any]], name: str) -> None:
    forward, backward, _ = DEPTHS[name]
    for found in world:
        ahead, back = found["asked"][name]
        assert list(ahead) == UNITS
        for place, unit in enumerate(UNITS):
            assert ahead[unit] == UNITS[: place + forward + 1]
        # Backward reads no table.
        order = UNITS[:0:-1]
        assert list(back)[: len(order)] == order
        for place, unit in enumerate(order):
            assert back[unit] == order[: place + backward + 1]


def test_memory_that_a_rank_alone_reduces_in_is_recorded_on_the_stream_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []
    buffer = SimpleNamespace(is_cuda=True, record_stream=recorded.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: buffer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "of the reduction")
    reduction = NoReduceScatter()
    sizes = {"dtype": torch.float32, "device": torch.device("cuda")}
    assert reduction.allocate((8,), **sizes) is buffer and not recorded
    assert reduction.allocate((8,), **sizes) is buffer and recorded == ["of the reduction"]


@pytest.mark.parametrize(
    ("device", "shape", "alone"),
    [
        ("cpu", (1,), True), ("cpu", (4, 1), True), ("cpu", (4,), False),
        ("cuda", (1,), True), ("cuda", (1, 1), True), ("cuda", (4, 1), False), ("cuda", (1, 4), False),
    ],
)  # fmt: skip
def test_replicas_on_cuda_are_reduced_by_torch(device: str, shape: tuple[int, ...], alone: bool) -> None:
    def size(dimension: int | None = None) -> int:
        return math.prod(shape) if dimension is None else shape[dimension]

    mesh = SimpleNamespace(device_type=device, ndim=len(shape), size=size)
    assert fsdp._skips_reduce_scatter(mesh) is alone  # type: ignore[arg-type]
