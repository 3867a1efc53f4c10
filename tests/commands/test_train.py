"""Arguments with which ``llama-toolkit train`` launches a run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from toolkit import launch
from toolkit.commands.train import main


@pytest.mark.parametrize(
    ("words", "launched", "sampled"),
    [
        ([], ["debug_model"], True),
        (["--training.steps", "5"], ["debug_model", "--training.steps", "5"], True),
        (["llama3_8b", "--training.steps=5"], ["llama3_8b", "--training.steps=5"], False),
        (["--job.config-file=a.toml"], ["--job.config-file=a.toml"], False),
        (["--training.steps", "5", "--job.config_file", "a.toml"], None, False),
    ],
)
def test_without_a_config_it_is_the_debug_model(
    words: list[str], launched: list[str] | None, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(launch, "main", lambda argv: seen.extend(argv) or 0)
    monkeypatch.setenv("SAMPLE", "")  # to be restored: main sets it
    monkeypatch.delenv("SAMPLE")
    assert main(words) == 0
    assert seen == (words if launched is None else launched)
    assert ("SAMPLE" in os.environ) == sampled


def test_help_has_its_own_text_before_the_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def keys(argv: Sequence[str]) -> int:
        print("--training.steps")
        return 0

    monkeypatch.setattr(launch, "main", keys)
    main(["--help"])
    said = capsys.readouterr().out
    assert "llama-toolkit train llama3_8b" in said and said.endswith("--training.steps\n")
