"""The benchmark of the loader: what it counts, and the model beside which it is read."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import torch

from benchmarks import loader
from toolkit.data.packing import PADDING


def test_the_fastest_model_is_the_median_of_this_toolkit_on_all_ranks(tmp_path: Path) -> None:
    case = {"shape": "5.2M", "ranks": 2, "threads": 1, "dtype": "float32", "rows": 4, "length": 256}
    slower = {"case": case | {"ranks": 1}, "seconds": {"ours": [0.5], "theirs": [0.001]}}
    fastest = {"case": case, "seconds": {"ours": [0.25, 0.001, 0.5], "theirs": [0.001] * 3}}
    (tmp_path / "peers.json").write_text(json.dumps([slower, fastest]))
    assert loader.fastest_model(tmp_path / "peers.json") == 2 * 4 * 256 / 0.25


def test_a_turn_counts_no_padding_and_times_the_loader_alone() -> None:
    """The loader takes a second a micro-batch, on a clock that nothing else moves."""
    now = 0.0

    def batches():
        nonlocal now
        for _ in count():
            now += 1.0
            yield {"documents": torch.tensor([[0, 0, 1, PADDING], [0] + [PADDING] * 3])}

    assert loader.turn(batches(), 2, 3.0, lambda: now) == (4, 4 * 4, 4.0)


def test_the_table_of_the_loader_is_of_medians() -> None:
    turns = [(10, 40, 1.0), (10, 40, 4.0), (10, 40, 2.0)]
    [_, _, row] = loader.report({"a form": ("2 × 4", turns)}, 2.0, []).splitlines()
    assert row == "| a form | 2 × 4 | 50.0% | 200,000 | 20 | 10 | 10 |"


def test_the_loader_is_that_of_one_of_two_ranks(tmp_path: Path) -> None:
    """Its global batch is of both: two micro-batches of one rank are two steps."""
    made, shape = loader.open_loader(loader.FORMS["packed conversations"], str(tmp_path))
    assert (shape.total, shape.local, shape.accumulation) == (8, 4, 1)
    batches = iter(made)
    next(batches), next(batches)
    assert made.samples == 2 * 8
