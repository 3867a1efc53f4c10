"""The state that all tests start from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = [
    HERE / "integration/test_meshes.py",
    HERE / "integration/test_one_curve.py",
    HERE / "finetune/test_meshes.py",
    HERE / "launcher/test_faults.py",
    HERE / "generation/test_transformers.py",
    HERE / "extensions/test_extensions.py",
    HERE / "weights/test_load.py",
    HERE / "parallel/test_float8.py",
    HERE / "checkpoint/test_kills.py",
    HERE / "checkpoint/test_meshes.py",
    HERE / "optim/test_muon.py",
    HERE / "models/test_attention.py",
    HERE / "benchmarks/test_gpu_session.py",
]
"""Files that take minutes. They start first: else the last one would run while the other processes idle."""

# nohup has SIGHUP ignored and a shell's & SIGINT; what inherits that takes it as the user's wish.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _broken_pipes_are_errors() -> None:
    """Undo what --help has done in this process, which ends silently with its reader."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
