"""Curves of runs as a picture, and what is said where there is nothing to draw."""

from __future__ import annotations

import builtins
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import run_command
from toolkit.commands import plot


def write_run(folder: Path, steps: int, *, log_freq: int = 1) -> Path:
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for step in range(log_freq, steps + 1, log_freq):
        measured = {"tokens_per_second": 100.0, "step_seconds": 3.6, "memory_gib": 1.0, "mfu": None}
        records.append({"step": step, "loss": 10 / step, "tokens": 50 * step, **measured})
        if step % 10 == 0:
            records.append({"step": step, "validation_loss": 11 / step})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "lo')  # cut by a kill
    return folder


def pixels(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:24])


def test_two_runs_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a", 120), write_run(tmp_path / "b", 40)]
    output = tmp_path / "both.png"
    assert run_command("plot", [*map(str, runs), "-o", str(output), "--x", "hours"]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    width, height = pixels(output)
    assert 1000 < width < 3000 and 600 < height < 2000
    assert output.stat().st_size > 20_000, "curves, not an empty page"


def test_a_run_of_a_single_line_without_validation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 1)
    assert run_command("plot", [str(run)]) == 0
    assert pixels(run / "curves.png")[0] > 1000


def test_axes() -> None:
    records = [
        {"step": 2, "tokens": 100, "step_seconds": 1800.0, "loss": 3.0},
        {"step": 2, "validation_loss": 4.0},
        {"step": 6, "tokens": 300, "step_seconds": 900.0, "loss": 2.0},
    ]
    assert plot.curve(records, "loss", "hours") == ([0.5, 1.5], [3.0, 2.0])  # the first of step 2 alone
    assert plot.curve(records, "validation_loss", "tokens") == ([100], [4.0])
    assert plot.curve(records, "loss", "step") == ([2, 6], [3.0, 2.0])


def test_smoothing_keeps_a_line_and_its_ends() -> None:
    line = [float(value) for value in range(300)]
    assert plot.smooth(line) == pytest.approx(line)
    waves = [float(index % 2) for index in range(300)]
    assert all(0.3 < value < 0.7 for value in plot.smooth(waves)[10:-10])


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    assert plot.names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert plot.names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("plot", [str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert str(tmp_path / "metrics.jsonl") in said and "job.dump_folder" in said
    (tmp_path / "metrics.jsonl").touch()
    assert run_command("plot", [str(tmp_path)]) == 3
    assert "contains no step yet" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 3, "event": "SKIPPED", "reason": "\xff"}\n')
    assert run_command("plot", [str(tmp_path)]) == 3
    assert "there is no number to draw yet" in capsys.readouterr().err


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert run_command("plot", [str(write_run(tmp_path / "a", 3))]) == 2
    assert "'.[plot]'" in capsys.readouterr().err
