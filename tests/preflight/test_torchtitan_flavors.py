"""torchtitan's integration tests, their flags unchanged, before a launch (benchmarks/torchtitan_flavors.py
runs them)."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU
from tests.torchtitan_flavors import CONFIG_FILE, FLAVORS, GENERATE
from toolkit.config import load_config
from toolkit.preflight import check

ROOT = Path(__file__).parents[2]
COMMANDS = [
    pytest.param(flavor, flags, id=f"{flavor.name}-{number}")
    for flavor in FLAVORS
    for number, flags in enumerate(flavor.commands)
    if flags != GENERATE
]


@pytest.mark.parametrize(("flavor", "flags"), COMMANDS)
def test_flags_are_taken_as_they_are(flavor, flags: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("toolkit.preflight.planned_run.torch_version", lambda: (2, 13))
    words = [*shlex.split(flags.format(folder=tmp_path)), f"--job.dump_folder={tmp_path}"]
    config = load_config(["--job.config_file", str(CONFIG_FILE), "--training.seq_len=256", *words])
    problems = {problem.key for problem in check(config, world_size=flavor.ranks, hardware=CPU)}
    if "--checkpoint.initial_load_in_hf" in flags:  # of the first command, which has not run
        problems.remove("checkpoint.initial_load_path")
    assert (flavor.refused in problems) if flavor.refused else not problems
