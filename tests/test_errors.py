"""The exception tree."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from toolkit.commands.arguments import flags_named
from toolkit.data.file_kinds import SourceError
from toolkit.errors import ConfigError, DataError, Problem, ToolkitError, report


@pytest.mark.parametrize("kind", [ConfigError, SourceError])
def test_a_program_names_its_own_flags(kind: type[ToolkitError]) -> None:
    problem = Problem("text_column is wrong", "set data.text_column", "text_column", "x", "a.toml:3")
    with pytest.raises(kind) as raised, flags_named({"data.text_column": "--column", "tp": "--tp"}):
        raise kind(problem)
    assert str(raised.value) == "--column = 'x'\n  rule: text_column is wrong\n  fix:  set --column"


def test_what_names_no_key_stays_as_it_is() -> None:
    with pytest.raises(DataError, match="^tp is no key here$"), flags_named({"tp": "--tp"}):
        raise DataError("tp is no key here")


def test_a_rank_that_only_listens_leaves_torchrun_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun kills the rank that tells when another ends first."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert report(DataError("no text"), show=False) == 3
    left = json.loads(file.read_text())["message"]
    assert left["message"] == "error: no text" and not capfd.readouterr().err
    assert int(left["extraInfo"]["timestamp"]) < time.time() - 1  # older than the failures of the killed
