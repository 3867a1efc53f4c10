"""Words that others wrote reach a terminal as text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit.checkpoint.manager import CheckpointManager
from toolkit.cli import run_command
from toolkit.config.job import Metrics
from toolkit.errors import EXIT_DATA, EXIT_FINISHED, DataError, first_few, one_line, printable, report
from toolkit.metrics.logger import MetricLogger

HOSTILE = "w\x1b[2J\x9b1m\u202e\u2066\u200b\r\x00\x7f\u2028\udc80é字"
SHOWN = r"w\x1b[2J\x9b1m\u202e\u2066\u200b\r\x00\x7f\u2028\udc80é字"


def test_what_steers_a_terminal_is_written_as_its_escape() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("two\n  lines\tof é字 🦙") == "two\n  lines\tof é字 🦙"
    assert one_line("a\nerror: b") == r"a\nerror: b"
    assert first_few(["a\nb", HOSTILE, "c"], 2) == rf"a\nb, {SHOWN} and 1 more"


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_told_without_them(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(DataError(f"{HOSTILE}\n  fix:  none"), show=True, debug=debug) == EXIT_DATA
    said = capsys.readouterr().err
    assert f"{SHOWN}\n  fix:  none" in said and said.replace("\n", "").isprintable()


def test_a_log_line_is_told_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricLogger(Metrics(), tmp_path, total_steps=3)
    log.say(HOSTILE)
    log.close()
    assert capsys.readouterr().out == SHOWN + "\n"


def test_a_name_of_a_tensor_stays_in_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("model.a\nstep-9: sound", "model.\x1b[31mb")
    CheckpointManager(tmp_path, say=lambda text: None).save(1, {name: torch.ones(2) for name in names}, {})
    assert run_command("checkpoint", ["inspect", str(tmp_path / "step-1"), "--tensors"]) == EXIT_FINISHED
    lines = [line for line in capsys.readouterr().out.splitlines() if "model." in line]
    assert [line.split(" float32")[0].rstrip() for line in lines] == [
        r"model.a\nstep-9: sound",
        r"model.\x1b[31mb",
    ]
