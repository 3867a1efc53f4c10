"""A run on two ranks with the interfaces of Linux hidden that macOS lacks: it trains, saves and generates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDING = """
import builtins, io, os

for name in ("memfd_create", "preadv", "sched_getaffinity", "pidfd_open", "eventfd"):
    if hasattr(os, name):
        delattr(os, name)

def hidden(function):
    def call(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/dev/shm", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **kwargs)
    return call

builtins.open = io.open = hidden(io.open)
os.open = hidden(os.open)
"""
SMALL = [
    "--model.dim=64", "--model.n_layers=2", "--training.seq_len=64", "--training.device=cpu",
    "--training.dataset=embedded_validation", "--validation.enable=false", "--training.steps=2",
]  # fmt: skip


def test_a_run_without_what_only_linux_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NGPU": "2", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "toolkit", "train", *SMALL]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "finished 2 steps" in done.stdout
    assert "\nIt was" in done.stdout  # generated from the checkpoint
    words = [sys.executable, "-c", "import os; os.preadv"]
    assert subprocess.run(words, env=environment, capture_output=True).returncode == 1
