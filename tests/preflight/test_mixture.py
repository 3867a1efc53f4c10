"""A mixture over a config that was written for one corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU, configure, write
from toolkit.preflight import check, notes

BASE = '[training]\ndataset = "embedded"\n'
MIXTURE = '[data.mixture.prose]\ndataset = "embedded_validation"\n'


@pytest.mark.parametrize(
    ("middle", "run", "flags"),
    [
        ("", MIXTURE, []),
        (MIXTURE, "", []),
        (MIXTURE, MIXTURE, ["--data.mixture.prose.weight=2"]),
        ("", "", ["--data.mixture.prose.dataset=embedded_validation"]),
    ],
    ids=["file", "base", "weight", "flag"],
)
def test_the_dataset_of_a_base_gives_way_and_is_noted(
    middle: str, run: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("base.toml", BASE)(tmp_path)
    write("middle.toml", f'extends = "base.toml"\n{middle}')(tmp_path)
    write("run.toml", f'extends = "middle.toml"\n{run}')(tmp_path)
    config = configure(["--job.config_file=run.toml", *flags])
    assert check(config, world_size=1, hardware=CPU) == []
    said = notes(config, world_size=1, hardware=CPU)
    assert said == ['training.dataset = "embedded" (base.toml:2) is overridden by [data.mixture]']
    write("saved.toml", config.to_toml())(tmp_path)
    again = configure(["--job.config_file=saved.toml"])
    assert again.data == config.data
    assert check(again, world_size=1, hardware=CPU) == []


def test_a_flag_replaces_the_dataset_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("run.toml", BASE)(tmp_path)
    config = configure(["--job.config_file=run.toml", "--data.mixture.a.dataset=embedded_validation"])
    assert check(config, world_size=1, hardware=CPU) == []
