"""Traffic that a fake step counts, beside the formulas of docs/parallelism.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests import mesh_runs, meshes
from tests.planner.traffic_formula import by_formula
from toolkit.hardware import detect
from toolkit.planner.traffic import WORLD, Exchange, step_traffic
from toolkit.preflight.planned_run import PlannedRun

# The formulas do not cover experts, whose traffic tests/integration/test_meshes.py compares with a run's.
LEFT_OUT = {"compiled", "muon", "moe", "mla", "mla2", "gpt_oss"}
LAYOUTS = [it for it in meshes.LAYOUTS if not LEFT_OUT & set(it.split())]
FEW = [
    *("shard2 by-class AC-2", "replicate2 shard2 HYBRID_SHARD_ZERO2 float32", "tp2 AC-full"),
    *("cp2 ring tied AC-2", "pp2 1F1B always by-class AC-op", "pp2 shard2 ZBVZeroBubble SHARD_GRAD_OP"),
    "shard2 cp2 tp2 tied accumulate3 AC-full",
]


def by_dimension(exchanges: Iterable[Exchange]) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """Bytes that are sent, without the few of the world."""
    found: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for each in exchanges:
        if each.dimension != WORLD:
            found[each.dimension, each.operation, each.ranks] += each.bytes
    return found


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        pytest.param(it, times, marks=[] if it in FEW and times > 1 else pytest.mark.exhaustive)
        for it in LAYOUTS
        for times in (1, 4)
    ],
)
def test_a_step_sends_what_the_formulas_say(layout: str, times: int, tmp_path: Path) -> None:
    """With four times the micro-batches too, of which some are run."""
    config = mesh_runs.configure(tmp_path, layout)
    rows = config.training.local_batch_size * (times if "pp" in layout else 1)
    sizes = {"global_batch_size": times * config.training.global_batch_size, "local_batch_size": rows}
    config = config.model_copy(update={"training": config.training.model_copy(update=sizes)})
    run = PlannedRun(config, meshes.ranks(layout), detect())
    assert run.mesh and run.model
    for rank in {0, run.world_size - 1 if run.mesh.pp > 1 else 0}:
        found, expected = (
            by_dimension(how(config, run.model, run.mesh, rank, param_dtype=torch.float64))
            for how in (step_traffic, by_formula)
        )
        assert found == expected


@pytest.mark.parametrize("layout", ["shard2 ep2 moe aux", "tp2 ep2 moe aux-seq", "cp2 ep2 ring moe aux-seq"])
def test_all_to_alls_of_experts_are_of_ep(layout: str, tmp_path: Path) -> None:
    """Beside tp or ring attention on the same ranks too, which is a group of the whole world."""
    [sent] = mesh_runs.planned(tmp_path, layout, [0])
    [of_experts] = [it for it in sent if it.operation == "all_to_all"]
    assert of_experts.dimension == "ep" and of_experts.ranks == (0, 1)
    assert of_experts.sent_bytes == of_experts.bytes / 2
    assert all(it.dimension != "ep" for it in sent if it is not of_experts)
    assert any(it.dimension == "cp" and it.operation == "send" for it in sent) == ("ring" in layout)


def test_a_simulated_block_can_be_recomputed_twice(tmp_path: Path) -> None:
    """A split backward recomputes a block twice, which torch allows only if it is compiled."""
    compiled, plain = (
        [mesh_runs.added_up(rank) for rank in mesh_runs.planned(tmp_path, layout)]
        for layout in ("pp2 compiled InterleavedZeroBubble AC-op", "pp2 InterleavedZeroBubble never")
    )
    assert compiled == plain  # recomputation sends nothing
