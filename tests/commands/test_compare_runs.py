"""The first step at which two runs differ, and what differs there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import run_command
from toolkit.errors import EXIT_DATA


def write_run(folder: Path, steps: dict[int, float], hashes: dict[int, dict[str, Any]] | None = None) -> str:
    folder.mkdir()
    records = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in steps.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in records))
    if hashes is not None:
        lines = [json.dumps({"step": step, **it}) + "\n" for step, it in hashes.items()]
        (folder / "fingerprints.jsonl").write_text("".join(lines))
    return str(folder)


def hashes(weight: str, gradient: str = "1", optimizer: str = "1") -> dict[str, Any]:
    names = [f"layers.{layer}.w" for layer in range(7)]
    return {
        "gradients": dict.fromkeys(names, gradient),
        "weights": {"a.w": weight, "b.w": "7"},
        "optimizer": {"optim.a.w.exp_avg": optimizer},
    }


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", {1: 2.0, 2: 1.5}, {2: hashes("5")})
    b = write_run(tmp_path / "b", {2: 1.5, 3: 1.0}, {2: hashes("5")})
    assert run_command("compare-runs", [a, b]) == 0
    assert (
        capsys.readouterr().out == "compared steps 2 to 2, 1 in all, fingerprints of 1\nequal, bit for bit\n"
    )


def test_what_differs_is_told_in_the_order_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = {step: hashes("5") for step in (2, 4, 8)}
    a = write_run(tmp_path / "a", dict.fromkeys(range(1, 9), 2.0), sound)
    other = sound | {8: hashes("6", "2", "2")}
    b = write_run(tmp_path / "b", dict.fromkeys(range(1, 8), 2.0) | {8: 2.5}, other)
    assert run_command("compare-runs", [a, b]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "first difference: step 8",
        "  loss: 2.0 and 2.5",
        "  gradients of 7 of 7: layers.0.w, layers.1.w, layers.2.w, layers.3.w, layers.4.w, …",
        "  weights of 1 of 2: a.w",
        "  optimizer of 1 of 1: optim.a.w.exp_avg",
        "  fingerprints are equal up to step 4",
    ]


def test_a_loss_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_run(tmp_path / name, {1: 2.0, 2: loss}) for name, loss in (("a", 1.0), ("b", 1.0 + 1e-15)))
    assert run_command("compare-runs", [a, b]) == 1
    said = capsys.readouterr().out
    assert "no fingerprints (metrics.fingerprint_every)" in said
    assert "first difference: step 2\n  loss: 1.0 and 1.000000000000001\n" in said


def test_runs_without_a_common_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", {1: 2.0}), write_run(tmp_path / "b", {2: 2.0})
    for other, why in ((b, "have no step in common"), (str(tmp_path), "is not the folder of a run")):
        assert run_command("compare-runs", [a, other]) == EXIT_DATA
        told = capsys.readouterr().err
        assert why in told and "Traceback" not in told
        assert run_command("compare-runs", [a, other, "--debug"]) == EXIT_DATA
        assert "Traceback" in capsys.readouterr().err
