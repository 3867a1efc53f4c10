"""The preflight as a program: exit codes, one message, no torch, no waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import toolkit.launch
import toolkit.preflight.__main__

ROOT = Path(__file__).parents[2]
DEBUG_MODEL = "train_configs/debug_model.toml"


def python(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run Python in the repository; also its CPU seconds, which other load on the machine does not change."""
    before = os.times()
    # A job's own rank variables, or a GPU, would change what is checked.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done, seconds


@pytest.mark.parametrize("module", ["toolkit.config", "toolkit.preflight", "toolkit.preflight.__main__"])
def test_imports_no_torch(module: str) -> None:
    done, _ = python("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_good_config(tmp_path: Path) -> None:
    folder = f"--job.dump_folder={tmp_path}"  # the default one may hold a run, with which it is compared
    done, seconds = python("-m", "toolkit.preflight", DEBUG_MODEL, "--world-size", "2", folder)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[0].split() == ["OK", DEBUG_MODEL]
    assert [line.split()[0] for line in shown] == ["OK", "model", "mesh", "with", "batch"]
    assert "5,245,184 parameters" in done.stdout and "dp_shard 2" in done.stdout
    assert seconds < 2.0  # 1.0 s on a slow CPU, where importing torch takes 5 s


def test_print_config() -> None:
    done, _ = python("-m", "toolkit.preflight", DEBUG_MODEL, "--job.print_config", "--training.steps=7")
    assert "steps = 7  # --training.steps\n" in done.stdout
    assert f'flavor = "debugmodel"  # {DEBUG_MODEL}:' in done.stdout


def test_a_reader_may_stop_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        words = [sys.executable, "-m", "toolkit.preflight", "--job.print_config"]
        done = subprocess.run(words, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, timeout=60)
    assert done.stderr == b""


@pytest.mark.parametrize("program", ["toolkit.preflight", "toolkit.train"])
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--training.steps=x"], 2, "must be an integer"),
        (["--training.stepz=3", "--optimizer.lr=y"], 2, "did you mean training.steps?"),
        (["--training.global_batch_size=3", "--memory_estimation.disable_fake_mode"], 2, "needs no device"),
        (["--training.dataset=c5"], 3, "embedded"),
        (["--model.hf_assets_path=no/such/folder"], 3, "no/such/folder"),
    ],
)
def test_mistake_is_one_message_at_once(program: str, words: list[str], code: int, says: str) -> None:
    config = [DEBUG_MODEL] if program == "toolkit.preflight" else ["--job.config_file", DEBUG_MODEL]
    done, seconds = python("-m", program, *config, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert seconds < 2.0  # 1.0 s on a slow CPU, where importing torch takes 5 s


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[job]\ndebug = true\n")
    for program, words in product(
        (toolkit.preflight.__main__.main, toolkit.launch.main),
        (
            ["--debug"],
            ["--job.debug"],
            ["--job.debug=true"],
            [f"--job.config_file={file}"],
            ["--job.no-debug"],
        ),
    ):
        assert program([*words, "--training.steps=x"]) == 2
        assert ("Traceback" in capsys.readouterr().err) == (words != ["--job.no-debug"])


@pytest.mark.parametrize("words", [["--world-size", "0"], ["--world_size=many"], ["--world-size"]])
def test_world_size_is_a_number(words: list[str]) -> None:
    done, _ = python("-m", "toolkit.preflight", DEBUG_MODEL, *words)
    assert done.returncode == 2 and "must be a whole number from 1 to 1000000" in done.stderr
