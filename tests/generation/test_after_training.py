"""A run ends with text of the model that it trained, if it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model.dim=64", "--model.n_layers=1", "--model.n_heads=4", "--training.seq_len=64",
    "--training.dataset=embedded_validation", "--validation.enable=false", "--training.steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_text_and_the_command_for_more(tmp_path: Path) -> None:
    """From the checkpoint, whose manifest tells the shape and the tokenizer."""
    words = ["-m", "toolkit.launch", "--job.config_file", "train_configs/debug_model.toml", *SMALL]
    words += [f"--job.dump_folder={tmp_path}", f"--data.cache_folder={tmp_path}/cache"]
    environment = {"NGPU": "1", "SAMPLE": "It was", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | environment,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    text = result.stdout.rpartition("It was")[2]
    assert len(text.strip()) > 20, result.stdout
    assert f"-m toolkit generate {tmp_path}/checkpoint --prompt 'It was'" in result.stderr


def test_the_script_asks_for_it_after_the_debug_run_alone() -> None:
    script = (ROOT / "run_train.sh").read_text()
    condition = next(line for line in script.splitlines() if "export SAMPLE" in line)
    for given, words, sample in (
        (None, [], "It was"),
        ("", ["--training.steps", "9"], "It was"),
        ("mine.toml", [], "none"),
        (None, ["--training.steps=9", "--job.config_file", "mine.toml"], "none"),
        (None, ["--job.config-file=mine.toml"], "none"),
    ):
        environment = {"PATH": os.environ["PATH"]} | ({} if given is None else {"CONFIG_FILE": given})
        shown = subprocess.run(
            ["bash", "-euc", f"{condition}\necho ${{SAMPLE:-none}}", "run_train.sh", *words],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert shown.strip() == sample
