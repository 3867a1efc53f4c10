"""Presets are listed, shown and copied; a copy is the same config in another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.cli import run_command
from toolkit.commands.configs import summary
from toolkit.config import load_config, presets
from toolkit.errors import EXIT_CONFIG, EXIT_FINISHED


def test_each_preset_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("configs", []) == EXIT_FINISHED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == presets.names()
    assert all(len(summary(name).split()) >= 3 for name in presets.names())
    assert run_command("configs", ["list"]) == EXIT_FINISHED and capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("name", presets.names())
def test_a_copy_is_the_same_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("configs", ["copy", name, "mine.toml"]) == EXIT_FINISHED
    copied, original = load_config(["mine.toml"]), load_config([name])
    differing = {"job": {"config_file"}}
    assert copied.model_dump(exclude=differing) == original.model_dump(exclude=differing)


def test_a_copy_replaces_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run_command("configs", ["copy", "fine_tune/chat"]) == EXIT_FINISHED
        and (tmp_path / "chat.toml").exists()
    )
    assert (
        run_command("configs", ["copy", "fine_tune/chat"]) == EXIT_CONFIG
        and "File exists" in capsys.readouterr().err
    )
    assert run_command("configs", ["show", "fine_tune/chatt"]) == EXIT_CONFIG
    told = capsys.readouterr().err
    assert "did you mean fine_tune/chat?" in told and "Traceback" not in told
    assert run_command("configs", ["show", "fine_tune/chatt", "--debug"]) == EXIT_CONFIG
    assert "Traceback" in capsys.readouterr().err
