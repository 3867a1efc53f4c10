"""FSDP's gathers and reductions through shared memory: those of gloo, in memory that nobody still reads."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.parallel.sharded import (
    EXACT,
    KEEP_ALL,
    UNTIED,
    changed,
    furthest,
    gradients,
    plain_gradients,
    sharded,
    step,
)
from toolkit import cpu
from toolkit.cpu.shared_memory import Gather, NotShared, Reduce, SharedMemory

SHARD = 1000
CPU = torch.device("cpu")


def _gather(gather: Gather, own: torch.Tensor) -> torch.Tensor:
    output, begun = _begun(gather, own)
    begun.wait()
    return output


def _begun(gather: Gather, own: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """Begin to gather as FSDP does: into the output's part of this rank."""
    memory = gather.memory
    output = gather.allocate((memory.size * len(own),), dtype=own.dtype, device=CPU)
    part = output.narrow(0, memory.rank * len(own), len(own))
    part.copy_(own)
    return output, gather(output, part, memory.group)


def _reduce(reduce: Reduce, whole: torch.Tensor) -> torch.Tensor:
    given = reduce.allocate((len(whole),), dtype=whole.dtype, device=CPU)
    given.copy_(whole)
    output = reduce.allocate((len(whole) // reduce.memory.size,), dtype=whole.dtype, device=CPU)
    reduce(output, given, reduce.memory.group, dist.ReduceOp.SUM)
    return output


def _beside_gloo() -> list[str]:
    """Name what is not as gloo has it."""
    group = dist.group.WORLD
    assert group is not None
    memory, wrong = SharedMemory(group), []
    gather, reduce = Gather(memory), Reduce(memory)
    torch.manual_seed(dist.get_rank())
    before = None
    for number, dtype in enumerate([torch.float64, torch.float32, torch.bfloat16, torch.uint8] * 3):
        own = torch.randint(0, 7, (SHARD * (1 + number % 3),)).to(dtype)
        found, expected = _gather(gather, own), torch.empty(len(own) * memory.size, dtype=dtype)
        dist.all_gather(list(expected.chunk(memory.size)), own)
        whole = torch.randint(0, 7, (SHARD * memory.size,)).to(dtype)
        summed, by_gloo = _reduce(reduce, whole), torch.empty(SHARD, dtype=dtype)
        dist.reduce_scatter(by_gloo, list(whole.chunk(memory.size)))
        if not (torch.equal(found, expected) and torch.equal(summed, by_gloo)):
            wrong.append(f"{number} {dtype}")
        if before and not torch.equal(*before):
            wrong.append(f"{number}: what was gathered before has changed")
        before = found, expected
    return [*wrong, *([] if len(memory.regions) < 9 else ["regions are not used again"])]


def _asked_ahead() -> tuple[list[bool], int]:
    """Say if what is gathered while the one before is reduced, as in a backward, is right, one rank late at
    each; and how many barriers that took."""
    group = dist.group.WORLD
    assert group is not None
    memory = SharedMemory(group)
    gather, reduce = Gather(memory), Reduce(memory)
    output, begun = _begun(gather, torch.zeros(SHARD))
    right = []
    for number in range(12):
        if number % memory.size == memory.rank:
            time.sleep(0.01)
        begun.wait()
        right.append(bool((output == number).all()))
        output, begun = _begun(gather, torch.full((SHARD,), number + 1.0))
        summed = _reduce(reduce, torch.full((SHARD * memory.size,), float(number)))
        right.append(bool((summed == number * memory.size).all()))
    return right, memory.barriers


def _dropped_at_other_times() -> list[bool]:
    """Say, for each of four gathers of which rank 0 keeps all results, that the first is as it was."""
    group = dist.group.WORLD
    assert group is not None
    gather = Gather(SharedMemory(group))
    first = _gather(gather, torch.ones(SHARD))
    held, unchanged = [first], []
    for number in range(4):
        found = _gather(gather, torch.full((SHARD,), number + 2.0))
        if dist.get_rank() == 0:
            held.append(found)
        else:
            del found
        unchanged.append(bool((first == 1).all()))
    return unchanged


def _out_of_step() -> str:
    group = dist.group.WORLD
    assert group is not None
    gather = Gather(SharedMemory(group))
    with pytest.raises(RuntimeError) as raised:
        _gather(gather, torch.ones(SHARD + dist.get_rank()))
    return str(raised.value)


def _not_shared() -> dict[str, Any]:
    """How far gradients are from one process where a rank cannot make or open the memory, or opens other."""
    found = {}
    expected = plain_gradients(UNTIED)
    for name, function, rank in (
        ("open", _refused, 1),
        ("pread", _other_memory, 1),
        ("memfd_create", _refused, 0),
    ):
        with patch.object(os, name, function if dist.get_rank() == rank else getattr(os, name)):
            with pytest.raises(NotShared):
                SharedMemory(dist.group.WORLD)  # type: ignore[arg-type]
            model = sharded(UNTIED, EXACT, checkpointing=KEEP_ALL)
        step(model, EXACT, 1)
        found[name] = furthest(gradients(model), expected)
    return found


def _refused(*_: Any) -> int:
    raise PermissionError


def _other_memory(*_: Any) -> bytes:
    return b"another machine"


def _ways() -> dict[str, str]:
    """The classes that communicate for a model, by configuration."""
    found = {}
    for name, how, fast in (
        ("default", EXACT, True),
        ("off", EXACT, False),
        ("over 2", changed(EXACT, fsdp_reshard_after_forward=2), True),
    ):
        cpu.enable(fast)
        model: Any = sharded(UNTIED, how)
        state = model.layers["0"]._get_fsdp_state()
        [group] = state._fsdp_param_groups if SINCE_2_13 else [state._fsdp_param_group]
        found[name] = type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__
    return found


def test_it_is_what_gloo_does() -> None:
    for ranks in (2, 4):
        assert run_world(_beside_gloo, ranks) == [[]] * ranks


def test_what_is_asked_ahead_needs_no_meetings_but_its_own() -> None:
    for ranks in (2, 3):
        for right, barriers in run_world(_asked_ahead, ranks):
            assert all(right) and len(right) == 24
            assert barriers <= 1 + 2 * 12 + 2  # until there are regions enough


def test_what_any_rank_holds_is_not_written_again() -> None:
    assert run_world(_dropped_at_other_times, 3) == [[True] * 4] * 3


def test_ranks_that_are_not_at_the_same_operation_say_so() -> None:
    for rank, said in enumerate(run_world(_out_of_step, 2)):
        assert said == (f"rank {rank} is at all_gather of {4 * 2 * (SHARD + rank)} bytes, and others are not")


def test_ranks_that_cannot_share_use_gloo() -> None:
    for found in run_world(_not_shared, 2):
        assert set(found) == {"open", "pread", "memfd_create"} and max(found.values()) < 1e-12


def test_it_can_be_turned_off() -> None:
    shared, gloo = ("Gather", "Reduce"), ("DefaultAllGather", "DefaultReduceScatter")
    [found, *_] = run_world(_ways, 4)
    assert found == {"default": shared, "off": gloo, "over 2": gloo}
