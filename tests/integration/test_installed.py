"""A wheel, built from an sdist and installed beside the dependencies: every command in a folder elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from toolkit.commands import COMMANDS
from toolkit.config import presets

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
SMALL = [
    "--model.dim=64", "--model.n_layers=2", "--training.seq_len=64", "--training.global_batch_size=4",
    "--training.local_batch_size=2", "--training.dataset=embedded_validation", "--validation.enable=false",
    "--training.device=cpu",
]  # fmt: skip
CHECKPOINT = "outputs/debug_model/checkpoint/step-2"
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
EXAMPLES = {
    "configs": (["configs", "copy", "llama3_8b", "mine.toml"], "llama-toolkit train mine.toml"),
    "preflight": (["preflight", "debug_model", "--world-size=8", "--job.dump_folder=new"], "OK"),
    "plan": (["plan", "debug_model", "--gpu", "h100", "--gpus", "1"], "tok/s/GPU"),
    "draw-plan": (
        ["draw-plan", "debug_model", "--gpu", "h100", "--gpus", "2", "-o", "plan.html"],
        "plan.html",
    ),
    "inspect-data": (["inspect-data", "debug_model", *SMALL, "--samples", "1"], "sample 0: 64 tokens"),
    "prepare-data": (["prepare-data", "debug_model", *SMALL], "[training]"),
    "train-tokenizer": (
        ["train-tokenizer", "--corpus", "text.txt", "--vocab-size", "512", "--output", "tok"],
        "tok/tokenizer.model: 512 entries",
    ),
    "generate": (["generate", "outputs/debug_model", "--prompt=It was", "--max-new-tokens=4"], "It was"),
    "chat": (["chat", "outputs/debug_model", "--max-new-tokens", "4"], ""),
    "evaluate": (["evaluate", "outputs/debug_model", "--text", "text.txt"], "nats per token"),
    "convert": (["convert", "dcp-to-hf", CHECKPOINT, "hf"], "hf: "),
    "checkpoint": (["checkpoint", "verify", "outputs/debug_model"], "sound"),
    "plot": (["plot", "outputs/debug_model", "-o", "curves.png"], "curves.png"),
    "compare-runs": (["compare-runs", "outputs/debug_model", "outputs/debug_model"], "equal, bit for bit"),
    "report": (["report", "outputs/debug_model"], "report.html"),
    "import-accelerate": (["import-accelerate", "fsdp.yaml", "--output", "run.toml"], "run.toml"),
    "check-cluster": (["check-cluster", "debug_model", *SMALL], "2 ranks: all well"),
    "completion": (["completion", "bash"], "complete -o default"),
}  # fmt: skip
"""The main example of each command, and what it prints."""


def _run(*words: str | Path, cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "NGPU": "2"}
    return subprocess.run(
        words, cwd=cwd, env=environment, input=text, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed command. The dependencies are those of this Python, without its editable install."""
    folder = tmp_path_factory.mktemp("installed")
    copy = folder / "source"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", copy], check=True)
    built = _run(sys.executable, "-c", BUILD.format("sdist", str(folder)), cwd=copy)
    assert built.returncode == 0, built.stderr
    sdist = folder / built.stdout.split()[-1]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    built = _run(
        sys.executable, "-c", BUILD.format("wheel", str(folder)), cwd=folder / sdist.name[: -len(".tar.gz")]
    )
    assert built.returncode == 0, built.stderr
    place = folder / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", str(place), cwd=folder)
    [packages] = (place / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = place / "bin/python"
    pip = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    installed = _run(sys.executable, *pip, built.stdout.split()[-1], cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return python.with_name("llama-toolkit")


@pytest.fixture(scope="module")
def folder(command: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps in it."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "text.txt").write_text((ROOT / "README.md").read_text())
    (place / "fsdp.yaml").write_text(ACCELERATE)
    run = _run(command, "train", *SMALL, "--training.steps=2", "--metrics.log_freq=1", cwd=place)
    assert run.returncode == 0, run.stderr
    assert "step 2/2" in run.stdout and "It was" in run.stdout
    return place


def test_presets_are_in_the_wheel(command: Path, tmp_path: Path) -> None:
    listed = _run(command, "configs", cwd=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines()] == presets.names()
    where = "import toolkit; print(toolkit.__file__)"
    assert str(ROOT) not in _run(command.with_name("python"), "-c", where, cwd=tmp_path).stdout


def test_every_command_has_an_example() -> None:
    assert {*EXAMPLES} == {*COMMANDS} - {"train"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_its_main_example_runs(name: str, command: Path, folder: Path) -> None:
    words, said = EXAMPLES[name]
    run = _run(command, *words, cwd=folder, text="Hello\n")
    assert run.returncode == 0, run.stderr
    assert said in run.stdout
