import json
import math

from toolkit.metrics.jsonl import JsonLines


def _records(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def _write(path, steps, resume_step=0, **values):
    lines = JsonLines(path, resume_step=resume_step)
    for step in steps:
        lines.write({"step": step, **values})
    lines.close()


def test_each_line_is_on_disk_when_written(tmp_path):
    lines = JsonLines(tmp_path / "new" / "metrics.jsonl")
    lines.write({"step": 1, "loss": 2.5, "mfu": None})
    assert _records(tmp_path / "new" / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "mfu": None}]


def test_what_json_cannot_say_becomes_null(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    assert _records(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "lr": None}]


def test_a_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 11), run=1)
    with path.open("a") as file:
        file.write('{"step": 11, "lo')  # killed while writing
    _write(path, range(7, 9), resume_step=6, run=2)
    assert [(r["step"], r["run"]) for r in _records(path)] == [(s, 1) for s in range(1, 7)] + [(7, 2), (8, 2)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_file_is_continued_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [5, 10])
    before = path.stat().st_ino
    _write(path, [15], resume_step=12)
    assert [r["step"] for r in _records(path)] == [5, 10, 15]
    assert path.stat().st_ino == before


def test_a_run_that_trains_nothing_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 11))
    for resume_step in (4, 0):  # an export of an older step, a checkpoint of the initial weights
        _write(path, [], resume_step=resume_step)
        assert [record["step"] for record in _records(path)] == [*range(1, 11)]


def test_a_new_run_keeps_the_lines_of_the_one_before_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2], run=1)
    _write(path, [1], run=2)
    assert [r["run"] for r in _records(path)] == [2]
    assert [r["run"] for r in _records(tmp_path / "metrics.previous.jsonl")] == [1, 1]
