"""Traces at the right steps, and a split that finds slow data and large collectives in real steps."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.config.job import Profiling
from toolkit.metrics.profiler import StepProfiler

CPU = torch.device("cpu")


def traced(
    folder: Path, steps: Sequence[int], *, freq: int, active: int = 1, warmup: int = 1, rank: int = 0
) -> list[str]:
    said: list[str] = []
    options = Profiling(profile_freq=freq, profiler_active=active, profiler_warmup=warmup)
    with StepProfiler(
        options,
        folder,
        first_step=steps[0],
        rank=rank,
        device=CPU,
        say=said.append,
    ) as profiler:
        for step in steps:
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.after_step(step)
    return said


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json"))


def test_a_resumed_run_traces_the_steps_that_it_would_have(tmp_path: Path) -> None:
    said = traced(tmp_path, range(6, 11), freq=3)
    assert files(tmp_path) == ["iteration_6/rank0_trace.json", "iteration_9/rank0_trace.json"]
    assert [line.split(":")[0] for line in said] == ["profiled step 6", "profiled step 9"]


def test_a_run_that_is_rolled_back_traces_the_steps_that_it_would_have(tmp_path: Path) -> None:
    said = traced(tmp_path, [*range(1, 6), *range(4, 10)], freq=4)
    assert [line.split(":")[0] for line in said] == ["profiled step 4", "profiled step 8"]
    assert traced(tmp_path, [1, 2, 3, 2, 3, 4], freq=4)[0].startswith("profiled step 4")


def test_a_trace_that_the_end_cuts_short_is_not_written(tmp_path: Path) -> None:
    said = traced(tmp_path, range(1, 9), freq=5, active=3, rank=2)
    assert files(tmp_path) == ["iteration_5/rank2_trace.json"]
    assert said == []
    steps = re.findall(r'"ProfilerStep#\d"', (tmp_path / "iteration_5" / "rank2_trace.json").read_text())
    assert len(set(steps)) == 3


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's export says nothing of a trace that did not fit, or leaves a part of it."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: None)
    (said,) = traced(tmp_path, range(1, 4), freq=3)
    assert said == f"the trace of step 3 was not written; is the disk of {tmp_path / 'iteration_3'} full?"
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path).write_text('{"trace')
    )
    assert "was not written" in traced(tmp_path, range(1, 4), freq=3)[0]


class Slow(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.04)
        return index


def _steps(folder: Path) -> tuple[list[str], float]:
    """Two steps of slow data and a collective of 64 MiB: what was said of the second, and its seconds."""
    said: list[str] = []
    batches, gradient = iter(DataLoader(Slow())), torch.ones(2**24)
    spent = 0.0
    with StepProfiler(
        Profiling(profile_freq=2, profiler_warmup=1),
        folder / "two",
        first_step=1,
        rank=dist.get_rank(),
        device=CPU,
        say=said.append,
    ) as profiler:
        for step in (1, 2):
            started = time.perf_counter()
            next(batches)
            dist.all_reduce(gradient)
            spent = time.perf_counter() - started
            profiler.after_step(step)
    config = small_config(
        folder / "run",
        training={"steps": 2},
        profiling={"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1},
    )
    small_trainer(config).train()
    return said, spent


def test_data_and_collectives_of_two_ranks(tmp_path: Path) -> None:
    (said, spent), (silent, _) = run_world(_steps, 2, tmp_path)
    assert silent == []
    milliseconds = {part: float(value) for part, value in re.findall(r"^  (\w+) +([\d.]+) ms", said[0], re.M)}
    assert milliseconds["data"] > 40
    assert milliseconds["communication"] > 5 * milliseconds["linear"]
    total = float(re.search(r"([\d.]+) ms", said[0])[1])  # type: ignore[index]
    # Each part is printed to a tenth of a millisecond; besides the steps the profiler starts itself.
    assert abs(sum(milliseconds.values()) - total) < 1
    assert milliseconds["data"] + milliseconds["communication"] > 0.8 * 1000 * spent
    expected = [f"iteration_2/rank{rank}_trace.json" for rank in (0, 1)]
    assert files(tmp_path / "two") == expected
    traces = tmp_path / "run" / "profile_traces"
    assert files(traces) == expected
    shapes = [
        event["args"].get("Input Dims")
        for event in json.loads((traces / expected[0]).read_text())["traceEvents"]
        if event["name"] in ("aten::mm", "toolkit::onednn_linear")
    ]
    assert any(found[1:2] == [[64, 64]] and found[0][-1] == 64 for found in shapes)
