"""benchmarks/gpu.sh where there is no GPU: what it would run, and what it tells of what ran."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.techniques import CASES
from tests.preflight.bad_runs import CPU, H100
from toolkit import preflight
from toolkit.config import load_config

ROOT = Path(__file__).resolve().parent.parent
FOR_SMALL = ["--small", "--device", "cpu"]
# Stands in for Python, to see what becomes of the pieces.
FAKE = """#!/usr/bin/env bash
case "$*" in
  *"-m pytest"*) echo "3 passed" ;;
  *compile.mode*) echo "an error | of two parts" && exit 3 ;;
  *benchmarks.attention*) echo "a row" && exit 124 ;;
  *) echo "fine" ;;
esac
"""


def _gpu(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["benchmarks/gpu.sh", *flags]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def _listed(*flags: str) -> dict[str, tuple[int, list[str]]]:
    """The limit in seconds and the words of the command of each piece, by name."""
    lines = map(shlex.split, _gpu("--list", *flags).stdout.splitlines())
    return {name: (int(limit), words) for name, limit, _, _, *words in lines}


def test_all_pieces_together_take_less_than_25_minutes() -> None:
    assert sum(limit for limit, _ in _listed().values()) < 25 * 60


@pytest.mark.parametrize("flags", [[], ["--small"], FOR_SMALL])
def test_no_piece_is_refused(flags: list[str]) -> None:
    hardware = CPU if flags == FOR_SMALL else H100
    trainings = [words[2:] for _, words in _listed(*flags).values() if words[1] == "toolkit.train"]
    assert len(trainings) == (3 if hardware == CPU else 4)
    for words in trainings:
        config = load_config(words)
        assert preflight.check(config, world_size=1, hardware=hardware) == []


def test_the_techniques_that_it_names_are_there() -> None:
    _, words = _listed()["techniques"]
    only = words[words.index("--only") + 1 : words.index("--output")]
    assert only and all(any(text in case.name for case in CASES) for text in only)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cpu"], "needs --small"),
        (["--device", "tpu"], "cuda or cpu, not tpu"),
        (["--only", "tests", "test"], "no piece test for cuda"),
        (["--fast"], "Usage"),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], says: str) -> None:
    ended = _gpu("--list", *flags)
    assert ended.returncode and says in ended.stdout + ended.stderr


def test_the_report_tells_what_ran_failed_or_ran_out_of_time(tmp_path: Path) -> None:
    fake = tmp_path / "a python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    results = tmp_path / "results"
    ended = _gpu("--results", str(results), PYTHON=str(fake))
    assert ended.returncode == 1, ended.stderr
    report = (results / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in report.splitlines() if line[:2] == "| "]
    told = {row[1]: (row[2], row[5]) for row in rows[1:]}
    assert told == {
        "tests": ("ran", "3 passed"),
        "pretrain_eager": ("ran", "fine"),
        "pretrain_compiled": ("ran", "fine"),
        "pretrain_cuda_graphs": ("failed (3)", "an error   of two parts"),
        "profile": ("ran", "fine"),
        "attention": ("out of time", "a row"),
        "techniques": ("ran", "fine"),
    }
    assert "an error | of two parts" in report, "the ends of the logs"
    assert sorted(path.stem for path in results.glob("*.log")) == sorted(told)


def test_what_there_is_no_time_for_is_not_begun(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    # Where bash begins to count its seconds.
    ended = _gpu("--only", "tests", "--results", str(tmp_path), PYTHON=str(fake), SECONDS="1475")
    assert ended.returncode == 1 and "| tests | not begun: no time left | 0 |" in ended.stdout
