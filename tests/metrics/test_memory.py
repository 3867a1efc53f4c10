"""Files are written and advice given when memory runs out, with the CUDA allocator played by a stand-in."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.config.job import Profiling
from toolkit.metrics import memory_snapshot
from toolkit.metrics.memory_snapshot import MemorySnapshots
from toolkit.metrics.out_of_memory import out_of_memory_advice
from toolkit.metrics.profiling import snapshot_folder

ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which …"
)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that switch the recording."""
    calls: list[Any] = []
    monkeypatch.setattr(memory_snapshot, "record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory_snapshot, "memory_snapshot", lambda: {"segments": []})
    return calls


def test_snapshots_every_few_steps(tmp_path: Path, allocator: list[Any]) -> None:
    with MemorySnapshots(tmp_path, freq=2, rank=3) as snapshots:
        for step in range(5, 9):
            snapshots.after_step(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_6", "iteration_8"]
    written = tmp_path / "iteration_6" / "rank3_memory_snapshot.pickle"
    assert pickle.loads(written.read_bytes()) == {"segments": []}  # noqa: S301
    assert allocator[0]["max_entries"] == 100_000 and allocator[-1] == {"enabled": None}


def test_at_the_end_of_memory(tmp_path: Path, allocator: list[Any]) -> None:
    device = torch.device("cpu")
    before = out_of_memory_advice(device, 5, ERROR, snapshots=tmp_path)
    assert "step 5: out of memory on cpu while allocating 20.00 GiB" in before
    assert str(tmp_path) not in before
    with pytest.raises(torch.OutOfMemoryError), MemorySnapshots(tmp_path, freq=100, rank=0) as snapshots:
        snapshots.after_step(4)
        raise ERROR
    written = tmp_path / "iteration_4_exit" / "rank0_memory_snapshot.pickle"
    assert str(written) in out_of_memory_advice(device, 5, ERROR, snapshots=tmp_path)


def test_only_snapshots_of_this_run_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = Profiling(enable_memory_snapshot=True, save_memory_snapshot_folder="~/snapshots")
    assert snapshot_folder(options, tmp_path / "run") == tmp_path / "snapshots"
    assert snapshot_folder(Profiling(), tmp_path / "run") is None


def test_another_error_leaves_no_snapshot(tmp_path: Path, allocator: list[Any]) -> None:
    with pytest.raises(ValueError), MemorySnapshots(tmp_path, freq=100, rank=0):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_the_advice_names_options_that_exist() -> None:
    from toolkit.config.schema import fields_by_key

    said = out_of_memory_advice(torch.device("cpu"), 1, ERROR)
    named = [word for word in said.replace("(", " ").split() if "." in word and word[0].isalpha()]
    assert {"activation_checkpoint.mode", "training.local_batch_size"} < set(named)
    assert set(named) <= set(fields_by_key())
