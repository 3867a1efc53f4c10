"""Fine-tuning on any mesh is that of one process: losses, norms, gradients of what is trained, and all
parameters, of which the frozen ones stay as they were to the last bit."""

from __future__ import annotations

import pytest
import torch

from tests import meshes
from tests.integration.test_meshes import run_all
from tests.mesh_runs import Result, added_up, planned, problems, recording
from toolkit.finetune.parameters import is_added

pytestmark = pytest.mark.timeout(600)  # the first test waits for all runs

FAST, MORE = (
    list(filter(meshes.runs_here, layouts)) for layouts in (meshes.FINETUNED_FAST, meshes.FINETUNED_MORE)
)


def is_counted(layout: str) -> bool:
    """Say if its transfers are counted: torch runs no compiled code while operators are watched, and how many
    rows experts get is not known."""
    return "compiled" not in layout.split() and meshes.has_known_traffic(layout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("finetuned"))


@pytest.fixture(scope="module")
def results(folder: str) -> dict[str, Result]:
    return run_all(folder, FAST)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_all(str(tmp_path_factory.mktemp("more_finetuned")), MORE)


@pytest.mark.parametrize("layout", FAST)
def test_layout_gives_the_gradients_of_one_process(results: dict[str, Result], layout: str) -> None:
    assert problems(layout, results[layout]) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", MORE)
def test_every_layout_does(more_results: dict[str, Result], layout: str) -> None:
    assert problems(layout, more_results[layout]) == []


@pytest.mark.parametrize("layout", meshes.every_second(filter(is_counted, FAST)))
def test_layout_sends_what_the_planner_says(folder: str, results: dict[str, Result], layout: str) -> None:
    ends = sorted({0, meshes.ranks(layout) - 1 if "pp" in layout else 0})
    sent = [results[layout]["sent"][rank] for rank in ends]
    assert sent == [added_up(rank) for rank in planned(folder, layout, ends)]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", list(filter(is_counted, MORE)))
def test_every_layout_does_that(folder: str, more_results: dict[str, Result], layout: str) -> None:
    assert more_results[layout]["sent"] == [added_up(rank) for rank in planned(folder, layout)]


@pytest.mark.parametrize("word", sorted({meshes.reference(layout) for layout in FAST}))
def test_what_is_trained_moves_and_the_rest_does_not(
    folder: str, results: dict[str, Result], word: str
) -> None:
    """Else layouts would be compared with a run in which nothing happens."""
    run = torch.load(recording(folder, word))
    initial, final = dict(run["initial"]), dict(run["final"])
    moved = {name for name in initial if not torch.equal(initial[name], final[name])}
    assert moved == {name for name, _ in run["gradients"]}
    whole = word.split()[1] in ("classification", "cpo", "simpo", "orpo", "reward") or "whole" in word
    assert (moved == initial.keys()) == whole
    if any(it in word for it in ("lora", "dora", "prefix", "adapter")):
        others = {"tok_embeddings.weight", *(["output.weight"] if "class" in word else [])}
        assert {name for name in moved if not is_added(name)} <= others
