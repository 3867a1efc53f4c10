"""Memory that malloc keeps for the next step, counted in page faults of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
PAGES = (4 << 24) // 4096
"""The faults of one of the four tensors, if pages are of 4 KiB."""


def told(code: str, **environ: str) -> list[int]:
    """The numbers that ``code`` tells."""
    run = subprocess.run(
        [sys.executable, "-c", f"{FAULTS}\n{code}"], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, **environ},
    )  # fmt: skip
    [line] = (line for line in run.stdout.splitlines() if line.startswith("told "))
    return [int(number) for number in line.split()[1:]]


KEEP = "from toolkit.cpu.memory import keep_freed_memory\nkept = int(keep_freed_memory())\n"
# It takes some rounds until holes for all are there, since aligned blocks are cut out of larger ones.
THEN = "for _ in range(8): faults()\nprint('told', kept, faults())"


@pytest.mark.slow
def test_freed_memory_is_faulted_once() -> None:
    assert told("print('told', faults())")[0] > 3 * PAGES
    kept, after = told(KEEP + THEN)
    assert kept and after < PAGES / 10


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_stays(name: str) -> None:
    value = "131072" if name.startswith("MALLOC") else "glibc.malloc.trim_threshold=131072"
    kept, after = told(KEEP + THEN, **{name: value})
    assert not kept and after > 3 * PAGES


def test_a_run_keeps_it(tmp_path: Path) -> None:
    flags = ["--training.steps=1", "--model.flavor=debugmodel", f"--job.dump_folder={tmp_path}"]
    flags += [f"--data.cache_folder={tmp_path / 'cache'}", "--training.device=cpu", "--training.seq_len=64"]
    run = f"from toolkit.train import main\nkept = 1 - main({flags!r})\n"
    kept, after = told(run + THEN)
    assert kept and after < PAGES / 10
