"""Compiled models train as eager ones do on any mesh: every parameter's gradient, against one eager process.

Layouts are lines of words of tests/meshes.py. In fp64, where graphs and layouts differ by the order of sums
alone. aot_eager traces forward and backward as inductor does, which is where a gradient can be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests import meshes
from tests.helpers import in_layout, run_world
from tests.mesh_runs import error
from tests.training import small_config
from toolkit.build import build_model
from toolkit.config import Config
from toolkit.models.from_config import model_args
from toolkit.parallel.dims import degrees
from toolkit.parallel.mesh import build_mesh

pytestmark = pytest.mark.timeout(900)  # the first test waits for all runs

CLOSE = 1e-10
ROWS, LENGTH = 8, 32
"""A micro-batch of one row, as many as two for each of four stages; elsewhere chunks of two rows a loss."""
OVERRIDES = {"training.loss_chunk_tokens": 64}


def _here(layouts: dict[int, list[str]]) -> dict[int, list[str]]:
    """Those that torch can compile here."""
    return {
        ranks: [layout for layout in some if meshes.runs_here(f"{layout} compiled")]
        for ranks, some in layouts.items()
    }


FAST = _here(
    {
        2: [
            "tp2 tied whole-logits AC-full",
            "cp2 AC-2",
            "pp2 ZBVZeroBubble never tied AC-op",
        ],
        # Two stages of a rank, whose blocks share a graph too.
        4: ["pp2 tp2 Interleaved1F1B AC-2"],
    }
)
CHECKPOINTING = ("", "AC-full", "AC-2", "AC-op")
MESHES = {
    2: ["shard2", "tp2", "tp2 tied", "tp2 whole-logits", "cp2", "cp2 tied head-first"]
    + [f"pp2 {schedule}" for schedule in ("GPipe", "1F1B", "Interleaved1F1B tied", "LoopedBFS")]
    + [f"pp2 {schedule} never" for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV tied")],
    4: [
        "cp2 tp2",
        "shard2 tp2 SHARD_GRAD_OP",
        "shard2 cp2",
        "pp2 shard2 1F1B",
        "pp2 tp2 1F1B",
        "pp2 tp2 ZBVZeroBubble never",
        "pp2 cp2 Interleaved1F1B",
        "pp2 cp2 DualPipeV never",
    ],
    8: ["shard2 cp2 tp2", "pp2 shard2 tp2 1F1B", "pp2 cp2 tp2 ZBVZeroBubble never"],
}
ALL = _here(
    {
        ranks: [f"{layout} {how}".strip() for layout, how in product(layouts, CHECKPOINTING)]
        for ranks, layouts in MESHES.items()
    }
)
INDUCTOR = {2: ["tp2 AC-op"], 4: ["pp2 tp2 ZBVZeroBubble never AC-full"]}


def _config(folder: str, layout: str, backend: str | None) -> Config:
    values = meshes.settings(layout) | OVERRIDES
    if backend:
        values |= {"compile.enable": True, "compile.backend": backend, "compile.cache_folder": folder}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return small_config(Path(folder), **tables)


def gradients(folder: str, layout: str, backend: str | None) -> dict[str, Tensor]:
    """Whole gradients of a step, of what this rank has of the model, by name."""
    torch._dynamo.reset()
    counters.clear()
    config = _config(folder, layout, backend)
    layout_degrees = degrees(config.parallelism, meshes.ranks(layout))
    assert layout_degrees is not None
    mesh = build_mesh(torch.device("cpu"), **asdict(layout_degrees))
    args = model_args(config, tokenizer_vocab=0)
    model_parts = build_model(config, args, mesh, torch.device("cpu"), param_dtype=torch.float64, seed=1)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(args.vocab_size, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::7] = -100
    documents = (torch.arange(LENGTH) // 5).expand(ROWS, LENGTH)
    rows = slice(mesh.dp_rank * ROWS // mesh.dp_size, (mesh.dp_rank + 1) * ROWS // mesh.dp_size)
    batch = {"tokens": tokens[rows], "labels": labels[rows], "documents": documents[rows], "positions": None}
    scale = torch.tensor(0.1, dtype=torch.float64)
    model_parts.backward([model_parts.prepare(batch, torch.device("cpu"))], scale)
    named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
    return {name: parameter.grad.full_tensor() for name, parameter in named}  # type: ignore[union-attr]


def _record(folder: str, layouts: Sequence[str]) -> None:
    for layout in layouts:
        torch.save(gradients(folder, layout, None), Path(folder, f"{layout}.pt"))


def _compare(folder: str, layouts: Sequence[str], backend: str) -> dict[str, Any]:
    """For each layout the error of each gradient on this rank, and how many graphs it took."""
    found = {}
    for layout in layouts:
        with in_layout(layout):
            mine = gradients(folder, layout, backend)
        reference = torch.load(Path(folder, f"{meshes.reference(layout)}.pt"))
        errors = {name: error(gradient, reference[name]) for name, gradient in mine.items()}
        found[layout] = errors, counters["stats"]["unique_graphs"]
    return found


def _all(folder: Path, layouts: dict[int, list[str]], backend: str = "aot_eager") -> dict[str, list[Any]]:
    """For each layout what each rank found."""
    references = sorted({meshes.reference(layout) for some in layouts.values() for layout in some})
    run_world(_record, 1, str(folder), references)
    found = {}
    for ranks, some in layouts.items():
        everywhere = run_world(_compare, ranks, str(folder), some, backend, timeout=400 * len(some))
        found |= {layout: [rank[layout] for rank in everywhere] for layout in some}
    return found


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _all(tmp_path_factory.mktemp("fast"), FAST)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _all(tmp_path_factory.mktemp("every"), ALL)


def _check(layout: str, ranks: list[Any]) -> None:
    errors = {name: value for found, _ in ranks for name, value in found.items()}
    settings = meshes.settings(layout)
    assert len(errors) == 9 * settings["model.n_layers"] + 2 + ("tied" not in layout.split())
    assert all(value <= CLOSE for found, _ in ranks for value in found.values())
    # Blocks share a graph, those with a checkpoint another, and so do chunks of loss.
    kinds = 2 if "AC-2" in layout.split() else 1
    assert max(graphs for _, graphs in ranks) <= kinds + 1


@pytest.mark.parametrize("layout", [layout for some in FAST.values() for layout in some])
def test_compiled_gradients(fast: dict[str, list[Any]], layout: str) -> None:
    _check(layout, fast[layout])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [layout for some in ALL.values() for layout in some])
def test_every_compiled_gradient(every: dict[str, list[Any]], layout: str) -> None:
    _check(layout, every[layout])


@pytest.mark.exhaustive
@pytest.mark.skipif(not meshes.SINCE_2_13, reason="inductor has no attention in fp64 on a CPU")
def test_inductor_too(tmp_path: Path) -> None:
    for layout, ranks in _all(tmp_path, INDUCTOR, "inductor").items():
        _check(layout, ranks)
