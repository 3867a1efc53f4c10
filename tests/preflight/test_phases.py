"""Phases as runs of their own: their mistakes, and what is reported of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_phases import LONG, OF_ONE_PHASE, SAVED, START
from tests.preflight.bad_runs import CPU, Bad, configure, save
from toolkit.config.phases import run_phases
from toolkit.preflight import check, notes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _flags(words: str) -> list[str]:
    return [f"--{word}" for word in words.split()]


@pytest.mark.parametrize("case", OF_ONE_PHASE, ids=lambda case: case.rule)
def test_a_phase_is_checked_as_a_run(case: Bad, folder: Path) -> None:
    case.prepare(folder)
    [problem] = check(configure(case.flags), world_size=case.world, hardware=case.hardware)
    assert problem.key == case.key and problem.origin.startswith("--phases.long."), problem
    for part in case.says:
        assert part in str(problem)


def test_a_mistake_of_the_whole_run_is_reported_once() -> None:
    flags = _flags(f"{LONG} {SAVED} model.name=lama3")
    assert [it.key for it in check(configure(flags), world_size=1, hardware=CPU)] == ["model.name"]


@pytest.mark.parametrize(("step", "phase"), [(50, ""), (100, ""), (100, "long"), (150, "long")])
def test_any_step_can_be_resumed(step: int, phase: str, folder: Path) -> None:
    model = {"rope_theta": 1e6 if phase else 500_000.0}
    save(folder, step, model=model, loader={"phase": phase, "seq_len": 512 if phase else 256})
    config = configure(_flags(f"{LONG} {SAVED} phases.long.rope_theta=1000000"))
    assert check(config, world_size=1, hardware=CPU) == []


def test_values_and_notes() -> None:
    flags = f"phases.last.start_step=300 phases.last.weights=web=2,code=0 {LONG} phases.long.rope_theta=1e6"
    corpora = "data.mixture.web.dataset=embedded_validation data.mixture.code.weight=3"
    config = configure(_flags(f"{flags} {corpora} {SAVED} training.steps=400"))
    first, long, last = run_phases(config)
    assert [(it.name, it.previous, it.start, it.end) for it in (first, long, last)] == [
        ("", None, 0, 100), ("long", "", 100, 300), ("last", "long", 300, 400)
    ]  # fmt: skip
    assert (long.config.training.seq_len, long.config.model.rope_theta) == (512, 1e6)
    assert (last.config.training.seq_len, last.config.model.rope_theta) == (256, None), "not the one before"
    assert [it.config.data.weights for it in (first, last)] == [{"code": 3, "web": 1}, {"web": 2}]
    assert long.config.origin("training.seq_len") == "--phases.long.seq_len"
    assert first.config.phases == long.config.phases == {} and long.config.phase == "long"
    assert config.training.seq_len == 256 and config.phase is None
    said = notes(config, world_size=1, hardware=CPU)
    assert "phase long from step 101 to 300: seq_len 512, rope_theta 1000000.0" in said


def test_an_unknown_corpus_is_reported_beside_other_mistakes() -> None:
    flags = _flags(f"{START} phases.long.weights=web=1 {SAVED} model.name=lama3 phases.more.start_step=200")
    found = check(configure(flags), world_size=1, hardware=CPU)
    assert {it.key for it in found} == {"phases.long.weights", "phases.more.start_step", "model.name"}
