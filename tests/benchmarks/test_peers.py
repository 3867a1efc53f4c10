"""The comparison with peers refuses two sides that do not compute the same, and splits all of a step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import peer_split
from benchmarks.peer_models import Case
from benchmarks.peers import SAME_LOSS, NotComparable, Turns, refuse_other_losses
from tests.helpers import run_world


@pytest.mark.parametrize("dtype", SAME_LOSS)
def test_other_losses_are_refused_with_the_step_and_both(dtype: str) -> None:
    case = Case("5.2M", 2, 1, dtype, 4, 256)
    mine = [8.0, 7.0]
    refuse_other_losses(case, {"ours": mine, "theirs": [8.0, 7.0 * (1 + 0.9 * SAME_LOSS[dtype])]})
    for other in (7.0 * (1 + 1.1 * SAME_LOSS[dtype]), float("nan")):
        with pytest.raises(NotComparable, match=f"at step 2 the loss is 7.0 here and {other} there"):
            refuse_other_losses(case, {"ours": mine, "theirs": [8.0, other]})


def test_the_split_of_a_step_is_of_all_its_time() -> None:
    x = torch.randn(512, 512, requires_grad=True)

    def step() -> None:
        (x @ x).sum().backward()
        time.sleep(0.2)

    shares = peer_split.split(step)
    assert tuple(shares) == peer_split.PARTS and sum(shares.values()) == pytest.approx(1)
    assert shares["matmuls"] > 0 == shares["attention"] == shares["communication"] == shares["optimizer"]
    assert shares["the rest"] > 0


def _take(file: str, number: int, count: int) -> list[tuple[float, float]]:
    """When this rank began and ended each of its turns."""
    turns, taken = Turns(Path(file), number), []
    for _ in range(count):
        with turns.mine():
            began = time.monotonic()
            time.sleep(0.02 * (1 + dist.get_rank()))
            taken.append((began, time.monotonic()))
    return taken


def test_sides_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "turn"
    file.write_text("0")
    with ThreadPoolExecutor() as pool:
        sides = list(pool.map(lambda number: run_world(_take, 2, str(file), number, 3), (0, 1)))
    by_turn = [list(zip(*ranks, strict=True)) for ranks in sides]
    turns = [turn for both in zip(*by_turn, strict=True) for turn in both]
    assert len(turns) == 6
    for before, after in zip(turns, turns[1:], strict=False):
        assert max(end for _, end in before) <= min(begin for begin, _ in after)
