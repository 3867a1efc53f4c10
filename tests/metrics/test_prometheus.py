"""The text file of Prometheus: its form, its labels, and that it is never seen in parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Metrics
from toolkit.metrics.logger import MetricLogger

SAMPLE = re.compile(r'(llama_toolkit_\w+)\{run="((?:[^"\\]|\\.)*)",rank="(\d+)"\} (\S+)')


def logger(folder: Path, file: str, **about: Any) -> MetricLogger:
    options = Metrics(enable_tensorboard=False, prometheus_file=file, save_for_all_ranks=True)
    return MetricLogger(options, folder, total_steps=9, **about)


def samples(path: Path) -> dict[str, float]:
    """The gauges of a file whose every line is one or announces it."""
    lines = path.read_text().splitlines()
    found = [SAMPLE.fullmatch(line) for line in lines[1::2]]
    assert all(found)
    assert lines[::2] == [f"# TYPE {match[1]} gauge" for match in found if match]
    return {match[1].removeprefix("llama_toolkit_"): float(match[4]) for match in found if match}


def test_the_newest_numbers(tmp_path: Path) -> None:
    log = logger(tmp_path / 'a "b"', "run.prom")
    log.log(1, {"loss": 5.0, "mfu": None, "reason": "text", "rewards/margins": 0.5})
    log.log(2, {"validation_loss": float("inf")})
    log.close()
    path = tmp_path / 'a "b"' / "run.prom"
    found = samples(path)
    assert found.pop("time_seconds") > 1.7e9
    nothing = found.pop("validation_loss")
    assert nothing != nothing
    assert found == {"step": 2, "loss": 5.0, "rewards_margins": 0.5}
    assert 'a \\"b\\"",rank="0"' in path.read_text()
    assert {it.name for it in path.parent.iterdir()} == {"run.prom", "metrics.jsonl"}


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    logger(tmp_path, f"{tmp_path}/collector/run.prom", rank=3).log(1, {"loss": 5.0})
    path = tmp_path / "collector" / "run.rank-3.prom"
    assert samples(path)["loss"] == 5.0 and 'rank="3"' in path.read_text()


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.prom").mkdir()
    log = logger(tmp_path, "run.prom")
    for step in (1, 2):
        log.log(step, {"loss": 5.0})
    log.close()
    assert capsys.readouterr().out.count("metrics.prometheus_file cannot be written") == 1
