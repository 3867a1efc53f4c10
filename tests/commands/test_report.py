"""A report of a run: one page with everything, from what a run leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import run_command
from toolkit.commands import report

pytest.importorskip("matplotlib")


def write_rank(folder: Path, rank: int, seconds: float, *, steps: int = 30) -> None:
    name = "metrics.jsonl" if rank == 0 else f"metrics.rank-{rank}.jsonl"
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 9 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64 * step}
        record |= {
            "tokens_per_second": 100.0,
            "step_seconds": 1.0,
            "data_seconds": 0.1,
            "memory_gib": 2.0 + rank,
        }
        record |= {"compute_seconds": seconds, "communication_seconds": 0.8 - seconds, "mfu": None}
        records.append(record | ({"checkpoint_seconds": 4.0} if step % 10 == 0 else {}))
    if rank == 0:
        reason = "the loss is nan: it began in <layers.1> on rank 1"
        records.insert(12, {"step": 12, "event": "SKIPPED", "reason": reason})
        records.append({"step": steps, "validation_loss": 0.5})
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / name).write_text(text + '{"step": 99, "lo')  # cut by a kill


def test_a_page_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "my run"
    for rank, seconds in enumerate((0.2, 0.6)):
        write_rank(run, rank, seconds)
    (run / "metrics.rank-1.previous.jsonl").write_text("{}")
    (run / "config.toml").write_text('[job]\ndescription = "a & b"\n[training]\nsteps = 600\n')
    (run / "heartbeat.json").write_text(json.dumps({"time": 1.0, "step": 30, "state": "finished"}))
    assert run_command("report", [str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 10 and page.count("<h1>") == 1
    assert not re.search(r"(src|href)=\"(?!#)", page) and "<script" not in page
    assert "it began in &lt;layers.1&gt; on rank 1" in page and "a &amp; b" in page
    assert "step 30 of 600: loss 0.3000 (at first 9.0000), 1,920 tokens, 100 tokens/s on average" in page
    assert "heartbeat: finished at step 30" in page and "validation loss 0.5000" in page


def test_numbers_of_the_report(tmp_path: Path) -> None:
    for rank, seconds in enumerate((0.2, 0.6)):
        write_rank(tmp_path, rank, seconds)
    ranks = report.read_ranks(tmp_path)
    assert [report.mean(ranks[rank], "compute_seconds") for rank in ranks] == pytest.approx([0.2, 0.6])
    assert report.totals(ranks[0]) == pytest.approx({"training": 30.0, "checkpoint": 12.0})
    assert report.totals(ranks[0][21:]) == pytest.approx({"training": 10.0, "checkpoint": 4.0})


def test_a_run_that_compares_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0, "step_seconds": 1.0}\n')
    output = tmp_path / "out.html"
    assert run_command("report", [str(tmp_path), "-o", str(output)]) == 0
    page = output.read_text()
    assert page.count("<svg") == 3 and "<p>none</p>" in page
    assert "<title>step 1: 9<" in page  # the tooltip of the point
    (tmp_path / "metrics.rank-1.jsonl").write_text('{"step": 1, "step_seconds": 3.0, "data_seconds": 1.0}\n')
    times, _ = report.rank_figures(report.pyplot(), report.read_ranks(tmp_path))
    widths = [bars.datavalues.tolist() for bars in times.axes[0].containers]
    assert widths == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 2.0]]  # data, and the rest of the step


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", [str(tmp_path)]) == 3
    assert "is not the folder of a run" in capsys.readouterr().err
    write_rank(tmp_path, 0, 0.2)
    for output, why in ((tmp_path / "no" / "x.html", "is not there"), (tmp_path, "it is a folder")):
        with pytest.raises(SystemExit):
            run_command("report", [str(tmp_path), "-o", str(output)])
        error = capsys.readouterr().err
        assert f"{output} cannot be written" in error and why in error


def test_damaged_files_are_drawn_without_what_is_damaged(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 0.2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('\nnull\n5\n{"loss": 1.0}\n')
    (tmp_path / "heartbeat.json").write_text('{"time": "now", "state": "training"}')
    assert run_command("report", [str(tmp_path)]) == 0
    assert "step 30: loss 0.3000" in (tmp_path / "report.html").read_text()


def test_the_loss_of_a_skipped_batch_is_not_what_a_run_has_reached(tmp_path: Path) -> None:
    skipped = {"step": 3, "event": "SKIPPED", "reason": "the loss 5000 is above 9"}
    records = [{"step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 5.0), (3, 5000.0))]
    [_, line] = report.summary_lines(tmp_path, [*records[:2], skipped, records[2]])
    assert line.startswith("step 3: loss 5.0000 (at first 9.0000)")
