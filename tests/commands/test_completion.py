"""Candidates for the last word of a command line, and the script of bash in a bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.commands import COMMANDS
from toolkit.commands.completion import candidates
from toolkit.config import presets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pl"], ["plan", "plot"]),
        (["train", "llama3_8b_o"], ["llama3_8b_one_gpu", "llama3_8b_one_h200"]),
        (["train", "llama3_8b", "--training.local"], ["--training.local_batch_size"]),
        (["train", "llama3_8b", "--optimizer.name", "Adam"], ["Adam", "AdamW", "AdamW8bit"]),
        (["train", "--compile.enable", ""], ["false", "true"]),
        (["plan", "llama3_8b", "--gpu"], ["--gpu", "--gpus", "--gpus-per-node"]),
        (["generate", "--prom"], ["--prompt", "--prompt-file"]),
        (["generate", ""], []),  # the shell completes files
        (["configs", "copy", "llama2"], ["llama2_70b", "llama2_7b"]),
        (["configs", "s"], ["show"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["unknown", ""], []),
    ],
    ids=" ".join,
)
def test_candidates(words: list[str], found: list[str]) -> None:
    assert candidates(words) == found


def test_the_first_word_is_any_command() -> None:
    assert {*candidates([""])} == {*COMMANDS, "--help", "--version"}


def test_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "llama-toolkit"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m toolkit "$@"\n')
    program.chmod(0o755)
    script = """
eval "$(llama-toolkit completion bash)"
COMP_WORDS=(llama-toolkit train fine_tune/ll); COMP_CWORD=2
_llama_toolkit
printf '%s\\n' "${COMPREPLY[@]}"
"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [name for name in presets.names() if name.startswith("fine_tune/ll")]
