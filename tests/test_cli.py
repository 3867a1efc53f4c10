"""The command ``llama-toolkit``: its list, mistakes, help of each subcommand, and the programs of tools/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import __version__
from toolkit.cli import main
from toolkit.commands import COMMANDS
from toolkit.errors import EXIT_CONFIG, EXIT_FINISHED

ROOT = Path(__file__).parents[1]
HELP_OF_ALL = """
import io, sys
from contextlib import redirect_stdout, suppress
from toolkit.commands import COMMANDS
for name, command in COMMANDS.items():
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        command.main(name)(["--help"])
    print("===", name, *text.getvalue().split()[:400])
print("torch" in sys.modules)
"""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == EXIT_FINISHED
        listed = re.findall(r"^  ([\w-]+) ", capsys.readouterr().out, re.MULTILINE)
        assert listed == [*COMMANDS]
    assert main(["--version"]) == EXIT_FINISHED
    assert capsys.readouterr().out == f"llama-toolkit {__version__}\n"


def test_an_unknown_command_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate"]) == EXIT_CONFIG
    assert "'genrate' is not a command" in (said := capsys.readouterr().err)
    assert "did you mean generate?" in said


def test_help_of_every_command_needs_no_torch() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", HELP_OF_ALL]
    text = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    *parts, torch = re.split(r"^=== |\n(?=True|False)", text, flags=re.MULTILINE)[1:]
    assert torch.strip() == "False"
    assert [part.split()[0] for part in parts] == [*COMMANDS]
    assert [name for part in parts if f"llama-toolkit {(name := part.split()[0])}" not in part] == []


def test_programs_of_tools_are_these_commands() -> None:
    started = {
        match[1]
        for file in (ROOT / "tools").glob("*.py")
        if (match := re.search(r'main\(\["([\w-]+)"', file.read_text()))
    }
    assert started == {*COMMANDS} - {"train", "preflight", "configs", "completion"}
    words = [sys.executable, "-m", "tools.checkpoint", "list", "no_folder"]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 3 and run.stderr.startswith("error: ")
