"""benchmarks/gpu_session.py where there is no GPU: its plan, a rehearsal, and what it tells of what ran."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import FIRST, PIECES, SECOND, Piece, Session, expected_seconds, slug
from tests.preflight.bad_runs import H100
from toolkit import preflight
from toolkit.config import load_config

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = argparse.Namespace(small=True, only=None, seconds=300.0, out=None, again=True, device="cpu")


def test_both_commands_have_time_for_their_pieces_and_pieces_for_what_they_expect() -> None:
    assert expected_seconds(FIRST) <= 480 and expected_seconds(SECOND) <= 195
    assert all(piece.expected <= piece.limit for piece in PIECES)


def test_pieces_that_run_at_the_same_time_take_as_long_as_the_longest() -> None:
    group = [piece.expected for piece in PIECES if piece.group == "A"]
    assert expected_seconds(["default_run", "exact", "tests", "race_streams", "race_blocking"]) == max(group)
    assert expected_seconds(["probe", "micro"]) == sum(
        piece.expected for piece in PIECES if piece.name in ("probe", "micro")
    )


@pytest.mark.parametrize("piece", [piece for piece in PIECES if piece.train], ids=lambda piece: piece.name)
def test_no_run_is_rejected_before_launch(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu_session, "STATE", tmp_path)
    for small in (False, True):
        session = Session(argparse.Namespace(**vars(OPTIONS) | {"small": small}))
        words = session.command(piece, tmp_path / piece.name)
        assert words[:2] == ["-m", "toolkit.train"]
        assert preflight.check(load_config(words[2:]), world_size=1, hardware=H100) == []


@pytest.mark.slow
def test_what_ran_failed_or_ran_out_of_time_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_session, "STATE", tmp_path / "state")
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "run", "--small"])
    pieces = [
        Piece("good", 30, 1, ["-c", "print('all | well')"]),
        Piece("bad", 30, 1, ["-c", "print('a\\nb'); raise SystemExit('error: it is bad')"]),
        Piece("slow", 16, 1, ["-c", "import time; print('begun', flush=True); time.sleep(60)"], group="B"),
        Piece("beside", 30, 1, ["-c", "print('at the same time')"], group="B"),
        Piece("gate", 30, 1, ["-c", "raise SystemExit(3)"], gate=True),
        Piece("after", 30, 1, ["-c", "print('never')"]),
    ]
    monkeypatch.setattr(gpu_session, "PIECES", pieces)
    options = argparse.Namespace(**vars(OPTIONS) | {"out": str(tmp_path / "out")})
    assert Session(options).run() == 1
    report = (tmp_path / "out" / "report.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in report.splitlines() if line.startswith("| ")}
    assert "| ran | 0 | all   well |" in rows["good"] or "| ran | 1 | all   well |" in rows["good"]
    assert "failed (1)" in rows["bad"] and "error: it is bad" in rows["bad"]
    assert "out of time" in rows["slow"] and "begun" in rows["slow"] and "ran" in rows["beside"]
    assert "failed (3)" in rows["gate"] and "after" not in rows
    assert "STOPPED: nothing can be measured without gate" in capsys.readouterr().out
    # The same command resumes with what has not run.
    pieces[1:] = [Piece("bad", 30, 1, ["-c", "print('mended')"])]
    again = argparse.Namespace(**vars(options) | {"again": False})
    session = Session(again)
    monkeypatch.setattr(session, "state", {k: v for k, v in session.state.items() if k in ("good", "bad")})
    assert session.run() == 0
    assert "mended" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_is_described_beside_its_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "STATE", tmp_path)
    session = Session(OPTIONS)
    step = {"tokens_per_second": 1000.0, "step_seconds": 2.0, "memory_gib": 55.0, "mfu": 0.5, "loss": 3.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(step) for _ in range(5)))

    class Done:
        def result(self) -> dict[str, float]:
            return {"memory": 50.0, "seconds": 1.9}

    session.forecasts["x"] = Done()  # type: ignore[assignment]
    told = session.timed(Piece("x", 30, 1), tmp_path)
    assert told.startswith("1,000 tokens/s, MFU 50.0%, step 2.000 s (spread 0.0%), peak 55.0 GiB")
    assert "forecast 50 GiB: +10.0% (!), forecast 1.9 s: +5.3%, loss 3.000" in told


@pytest.mark.parametrize(
    ("losses", "verdict"), [((3.0, 2.0), "the same"), ((3.0, 2.1), "GRADIENTS ARE OVERWRITTEN")]
)
def test_runs_that_race_are_compared(
    losses: tuple[float, ...], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "STATE", tmp_path)
    session = Session(OPTIONS)
    session.state["losses"] = {"race_streams": losses, "race_blocking": (3.0, 2.0)}
    session.race()
    assert session.state["race"].endswith(f"{verdict}.")


def test_a_folder_is_named_after_the_gpu() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "h100" and slug("NVIDIA H200") == "h200"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cpu"], "needs --small"),
        (["--only", "test"], "invalid choice: 'test'"),
        (["--small"], "nvidia-smi shows no GPU here"),
    ],
)
def test_what_cannot_be_is_rejected(flags: list[str], says: str) -> None:
    command = [sys.executable, "benchmarks/gpu_session.py", "run", *flags]
    environment = os.environ | {"PATH": "/nowhere"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and says in ended.stderr


REHEARSED = ["probe", "exact", "8b_early_step", "micro", "attention", "generate"]
"""One training run, which stands for all, whose flags are checked above, and the pieces that do not train."""


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=pytest.mark.slow) for names in (REHEARSED, [piece.name for piece in PIECES])],
    ids=["some", "all"],
)
def test_a_rehearsal_runs_its_pieces(names: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_session.py", "run", "--small", "--device", "cpu", "--again"]
    command += ["--seconds", "1200", "--out", str(tmp_path), "--only", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report = (tmp_path / "report.md").read_text()
    assert ended.returncode == 0, report
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")][1:]
    assert {row[0][2:]: row[1] for row in rows} == dict.fromkeys(names, "ran")
