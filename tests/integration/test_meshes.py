"""One curve on any mesh: losses, norms and every parameter's gradient of a layout are those of one process.

In fp64, where rounding differs by 1e-15, so that a wrong factor, a lost summand or a wrong position shows at
any size. That it does is tested too, by faults made on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import meshes
from tests.helpers import run_world
from tests.mesh_runs import (
    Result,
    added_up,
    compare,
    compare_all,
    configure,
    error,
    largest,
    planned,
    problems,
    record,
    recording,
)
from toolkit import build
from toolkit.hardware import Hardware
from toolkit.parallel import fsdp, tensor_parallel
from toolkit.parallel.dims import STRATEGIES
from toolkit.parallel.model_parts import ModelParts, SingleModel
from toolkit.parallel.pipeline_parallel import Pipeline
from toolkit.parallel.pipeline_schedules import SCHEDULES
from toolkit.parallel.sequence_shards import SequenceShards
from toolkit.preflight import check

pytestmark = pytest.mark.timeout(600)  # the first test waits for all runs

CPU = Hardware("cpu", "CPU", 2, native_bf16=True)
FAST, MORE = (list(filter(meshes.runs_here, layouts)) for layouts in (meshes.FAST, meshes.MORE))
AT_ONCE = 20
"""Layouts that a world runs, at most: what they leave behind grows."""


def run_all(folder: str, layouts: Sequence[str]) -> dict[str, Result]:
    """Each layout compared with its reference, which one process computes once."""
    references = {meshes.reference(layout) for layout in layouts}
    run_world(record, 1, folder, sorted(references), timeout=300)
    results: dict[str, Result] = {}
    for ranks in sorted({meshes.ranks(layout) for layout in layouts}):
        mine = [layout for layout in layouts if meshes.ranks(layout) == ranks]
        for first in range(0, len(mine), AT_ONCE):
            part = mine[first : first + AT_ONCE]
            everywhere = run_world(compare_all, ranks, folder, part, timeout=60 * len(part))
            results |= dict(zip(part, everywhere[0], strict=True))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("meshes"))


@pytest.fixture(scope="module")
def results(folder: str) -> dict[str, Result]:
    return run_all(folder, FAST)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_all(str(tmp_path_factory.mktemp("more_meshes")), MORE)


@pytest.mark.parametrize("layout", FAST)
def test_layout_gives_the_gradients_of_one_process(results: dict[str, Result], layout: str) -> None:
    assert problems(layout, results[layout]) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", MORE)
def test_every_layout_does(more_results: dict[str, Result], layout: str) -> None:
    assert problems(layout, more_results[layout]) == []


@pytest.mark.parametrize("layout", meshes.every_second(filter(meshes.has_known_traffic, FAST)))
def test_layout_sends_what_the_planner_says(folder: str, results: dict[str, Result], layout: str) -> None:
    ends = sorted({0, meshes.ranks(layout) - 1 if "pp" in layout else 0})
    sent = [results[layout]["sent"][rank] for rank in ends]
    assert sent == [added_up(rank) for rank in planned(folder, layout, ends)]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "layout", [it for it in MORE if "compiled" not in it.split() and meshes.has_known_traffic(it)]
)
def test_every_layout_does_that(folder: str, more_results: dict[str, Result], layout: str) -> None:
    assert more_results[layout]["sent"] == [added_up(rank) for rank in planned(folder, layout)]


def test_the_reference_clips_and_what_is_trained_makes_a_difference(
    folder: str, results: dict[str, Result]
) -> None:
    """Else a layout that clips, or ties the head, would be compared with a run that does not."""
    plain, tied = (torch.load(recording(folder, layout)) for layout in ("one", "one tied"))
    assert all(norm > meshes.PLAIN["training.max_norm"] for norm in plain["norms"])
    expected = dict(tied["gradients"])
    apart = {
        name: error(gradient, expected[name]) for name, gradient in plain["gradients"] if name in expected
    }
    assert min(apart.values()) > 1e-3


# What would be found


def _perturbed(self: ModelParts, *args: Any, backward: Any = SingleModel.backward) -> torch.Tensor:
    """One gradient of one rank is off by 1e-8."""
    total = backward(self, *args)
    if dist.get_rank() == 1:
        named = dict(self.named_parameters())
        named["layers.2.feed_forward.w2.weight"].grad._local_tensor.mul_(1 + 1e-8)
    return total


def _unsummed(
    weight: torch.Tensor, gradient: Any = None, local: Any = tensor_parallel.local_shard
) -> torch.Tensor:
    """The part of a weight, whose gradient is taken for the whole one."""
    return local(weight)


def _other_seed(named: Any, seed: int, rules: Any, initialize: Any = build.initialize) -> None:
    initialize(named, seed + dist.get_rank(), rules)


def _backwards(
    self: SequenceShards, gathered: torch.Tensor, whole: Any = SequenceShards.unshard
) -> torch.Tensor:
    return whole(self, gathered).flip(1)


FAULTS: dict[str, tuple[str, AbstractContextManager[Any], str]] = {
    "one gradient off by 1e-8": (
        "shard2",
        patch.object(SingleModel, "backward", _perturbed),
        "gradient of layers.2.feed_forward.w2.weight",
    ),
    "gradients averaged": (
        "shard2",
        patch.object(fsdp, "_sum_gradients", lambda model: None),
        "gradient of layers.0.attention.wq.weight",
    ),
    "a norm's gradient not summed over tp": (
        "tp2",
        patch.object(tensor_parallel, "local_shard", _unsummed),
        "gradient of layers.3.ffn_norm.weight",
    ),
    "gradients of a tied pair not added": (
        "pp2 1F1B tied",
        patch.object(Pipeline, "_add_tied_gradients", lambda self: None),
        "gradient of tok_embeddings.weight",
    ),
    "keys and values from last to first": (
        "cp2",
        patch.object(SequenceShards, "unshard", _backwards),
        "losses, step 1",
    ),
    "weights by rank": ("shard2", patch.object(build, "initialize", _other_seed), "output.weight: other"),
    # The loss is right: only gradients show that torch's zero bubbles read parameters that are freed.
    "zero bubbles on freed parameters": (
        "pp2 InterleavedZeroBubble always",
        nullcontext(),
        "gradient of layers.1.attention.wq.weight",
    ),
}
"""A layout, what is wrong with it, and what that must be found by."""


def _find_faults(folder: str) -> dict[str, list[str]]:
    found = {}
    for name, (layout, fault, _) in FAULTS.items():
        with fault:
            found[name] = problems(layout, compare(folder, layout))
    return found


@pytest.fixture(scope="module")
def found_faults(folder: str, results: dict[str, Result]) -> dict[str, list[str]]:
    return run_world(_find_faults, 2, folder)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(found_faults: dict[str, list[str]], fault: str) -> None:
    expected = FAULTS[fault][2]
    assert any(said.startswith(expected) for said in found_faults[fault])


def test_one_gradient_is_found_by_its_name_and_a_right_loss_hides_nothing(
    found_faults: dict[str, list[str]],
) -> None:
    assert [said for said in found_faults["one gradient off by 1e-8"] if said.startswith("gradient")] == [
        "gradient of layers.2.feed_forward.w2.weight: 1.0e-08"
    ]
    assert "losses, step 1" not in str(found_faults["zero bubbles on freed parameters"])


def test_no_number_is_worse_than_any() -> None:
    assert largest([1.0, float("nan"), 2.0]) != largest([1.0, 2.0])
    assert error(torch.tensor([1.0, float("nan")]), torch.ones(2)) != 0.0


# The list


def test_a_layout_is_in_the_list_once() -> None:
    assert len({frozenset(layout.split()) for layout in meshes.LAYOUTS}) == len(meshes.LAYOUTS) >= 100


def test_the_list_has_every_pair_of_techniques() -> None:
    tried = meshes.pairs(meshes.LAYOUTS)
    assert {frozenset(pair) for pair in combinations(meshes.CROSSED, 2)} - meshes.never_together() <= tried


@pytest.mark.parametrize("layouts", [meshes.FAST, meshes.MORE], ids=["fast", "more"])
def test_each_list_has_every_schedule_and_strategy(layouts: list[str]) -> None:
    assert set().union(*map(meshes.techniques, layouts)) >= {*SCHEDULES, *STRATEGIES}


def test_the_list_has_every_three_and_four_dimensions() -> None:
    shapes = [meshes.degrees(layout).keys() for layout in meshes.LAYOUTS]
    for size in (3, 4, 5):
        for dimensions in combinations(meshes.DIMENSIONS, size):
            assert set(dimensions) in shapes
    assert sum(len(shape) == 3 for shape in shapes) >= 20
    assert sum(len(shape) >= 4 for shape in shapes) >= 10


@pytest.mark.parametrize("layout", FAST + MORE)
def test_layouts_are_runs_that_the_preflight_allows(tmp_path, layout: str) -> None:
    assert check(configure(tmp_path, layout), world_size=meshes.ranks(layout), hardware=CPU) == []


@pytest.mark.parametrize(
    "layout", meshes.REFUSED + [layout for layout in meshes.LAYOUTS if not meshes.runs_here(layout)]
)
def test_what_the_list_leaves_out_the_preflight_refuses(tmp_path, layout: str) -> None:
    assert check(configure(tmp_path, layout), world_size=meshes.ranks(layout), hardware=CPU)
