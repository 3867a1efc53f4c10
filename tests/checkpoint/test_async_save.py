"""Saves that are written while training goes on: what they hold, how they fail, what they reuse."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit import validate
from toolkit.checkpoint import dcp_storage
from toolkit.checkpoint import manager as manager_module
from toolkit.checkpoint.async_save import BackgroundWriter
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import committed_steps, read_manifest
from toolkit.errors import CheckpointError


class _Gate:
    """Holds up every commit until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        commit = manager_module.commit_folder

        def wait_and_commit(*arguments: Any) -> None:
            self.open.wait(60)
            commit(*arguments)

        monkeypatch.setattr(manager_module, "commit_folder", wait_and_commit)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gate]:
    gate = _Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoint", background=BackgroundWriter(), say=lambda text: None)


def _load(manager: CheckpointManager, step: int) -> torch.Tensor:
    found = torch.zeros(1000)
    manager.load(step, {"model.weight": found})
    return found


def test_what_is_saved_is_what_was_there_when_save_was_called(
    manager: CheckpointManager, gate: _Gate
) -> None:
    weight, losses = torch.arange(1000.0), {"losses": [2.0]}
    manager.save(1, {"model.weight": weight}, {"health": losses})
    weight.zero_()  # training goes on
    losses["losses"].append(1.0)
    assert committed_steps(manager.folder) == []
    manager.end_save(wait=False)
    gate.open.set()
    manager.end_save(wait=True)
    assert committed_steps(manager.folder) == [1]
    assert torch.equal(_load(manager, 1), torch.arange(1000.0))
    assert read_manifest(manager.folder / "step-1")["run"] == {"health": {"losses": [2.0]}}


def test_a_save_waits_for_the_one_before(manager: CheckpointManager, gate: _Gate) -> None:
    """Their copies are in the same memory."""
    manager.save(1, {"model.weight": torch.ones(1000)}, {})
    threading.Timer(0.2, gate.open.set).start()
    manager.save(2, {"model.weight": 2 * torch.ones(1000)}, {})
    assert torch.equal(_load(manager, 1), torch.ones(1000))
    assert torch.equal(_load(manager, 2), 2 * torch.ones(1000))


def test_a_write_that_fails_is_raised_once_and_costs_nothing_else(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"model.weight": torch.ones(1000)}
    manager.save(1, weights, {})
    manager.end_save(wait=True)

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(dcp_storage._HashingStream, "write", full)
        manager.save(2, weights, {})
        with pytest.raises(CheckpointError, match="step 2 was not saved .*No space left"):
            manager.end_save(wait=True)
    manager.end_save(wait=True)
    assert [path.name for path in manager.folder.iterdir()] == ["step-1"]
    manager.save(3, weights, {})
    manager.end_save(wait=True)
    assert committed_steps(manager.folder) == [1, 3]


def test_copies_are_made_in_the_same_memory_each_time() -> None:
    background, weight = BackgroundWriter(), torch.ones(1000)
    first = background.copy({"model.weight": weight.detach()})["model.weight"]
    weight.mul_(3)
    second = background.copy({"model.weight": weight.detach()})["model.weight"]
    assert first.data_ptr() == second.data_ptr() != weight.data_ptr()
    assert torch.equal(second, weight)


def test_a_copy_is_of_the_dtype_and_shape_that_are_there() -> None:
    background = BackgroundWriter()
    for tensor in (torch.ones(4), torch.ones(4, dtype=torch.bfloat16), torch.ones(2, 3), torch.tensor(5.0)):
        copied = background.copy({"model.weight": tensor})["model.weight"]
        assert (copied.dtype, copied.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copied, tensor)


def _save_while_reducing(folder: str) -> tuple[float, bool, bool]:
    """Two ranks train, here by an all-reduce, while shards are written through a group of its own."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(10_001.0), mesh, [Shard(0)])
    manager = CheckpointManager(folder, background=BackgroundWriter(), group=dist.new_group())
    total = torch.zeros(())
    for step in range(1, 6):
        manager.save(step, {"model.weight": weight}, {})
        for _ in range(50):
            ones = torch.ones(())
            dist.all_reduce(ones)
            total += ones
        weight.to_local().add_(1)
    manager.end_save(wait=True)
    found = distribute_tensor(torch.zeros(10_001), mesh, [Shard(0)])
    manager.load(3, {"model.weight": found})
    whole = found.full_tensor()
    before = weight.to_local().clone()
    copied = BackgroundWriter().copy({"model.weight": weight})["model.weight"]
    weight.to_local().add_(1)
    alike = isinstance(copied, DTensor) and copied.placements == weight.placements
    kept = alike and torch.equal(copied.to_local(), before)
    return total.item(), torch.equal(whole, torch.arange(10_001.0) + 2), kept


def test_ranks_go_on_talking_while_they_save(tmp_path: Path) -> None:
    assert run_world(_save_while_reducing, 2, str(tmp_path)) == [(500.0, True, True)] * 2


def _failing_run(folder: str) -> dict[str, Any]:
    """Trains six steps; the disk is full at the saves of steps 2 and 4. Then another run, full to its end."""
    outcomes: dict[str, Any] = {}
    write = dcp_storage._HashingStream.write
    for mode in ("disabled", "async"):
        for full, name in (((2, 4), "in between"), ((2, 4, 6), "to the end")):
            trainer = small_trainer(
                small_config(
                    Path(folder, f"{mode} {name}"),
                    training={"steps": 6, "seq_len": 32},
                    checkpoint={"enable": True, "interval": 2, "async_mode": mode},
                )
            )
            said: list[str] = []

            def filling(stream: Any, data: Any, trainer: Any = trainer, full: Any = full) -> int:
                if trainer.saving in full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(stream, data)

            save = trainer.checkpointer.manager.save

            def noting(step: int, *rest: Any, trainer: Any = trainer, save: Any = save) -> Any:
                trainer.saving = step
                return save(step, *rest)

            dcp_storage._HashingStream.write = filling  # type: ignore[method-assign]
            trainer.checkpointer.manager.save = noting  # type: ignore[method-assign]
            start_log = trainer._start_log

            def listening(trainer: Any = trainer, start_log: Any = start_log, said: Any = said) -> None:
                start_log()
                trainer.checkpointer.say = said.append

            trainer._start_log = listening  # type: ignore[method-assign]
            try:
                code: Any = trainer.train()
            except CheckpointError as error:
                code = str(error)
            finally:
                dcp_storage._HashingStream.write = write  # type: ignore[method-assign]
            steps = committed_steps(Path(folder, f"{mode} {name}", "checkpoint"))
            outcomes[f"{mode} {name}"] = (
                code,
                trainer.train_state.step,
                steps,
                [x for x in said if "NOT SAVED" in x],
            )
    outcomes["best"] = _run_with_a_best(folder, steps=8, samples=4)
    outcomes["best, resumed"] = _run_with_a_best(folder, steps=10, samples=4)
    outcomes["best of others"] = _run_with_a_best(folder, steps=12, samples=2)
    outcomes["best beside a NaN"] = _run_with_a_best(folder, steps=16, samples=1)
    _run_with_a_best(folder, steps=18, samples=1)
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder, "best", "checkpoint", "step-16"))
    dist.barrier()
    outcomes["best that is gone"] = _run_with_a_best(folder, steps=20, samples=1)
    return outcomes


def _run_with_a_best(folder: str, *, steps: int, samples: int) -> tuple[list[int], float, int]:
    """Validation losses of every second step, of which that of step 4 is the lowest and cannot be saved."""
    validating = {"enable": True, "freq": 2, "seq_len": 32, "local_batch_size": 1, "samples": samples}
    saving = {"enable": True, "interval": 2, "keep_best": True, "keep_latest_k": 1}
    tables = {"training": {"steps": steps, "seq_len": 32}, "validation": validating, "checkpoint": saving}
    trainer = small_trainer(small_config(Path(folder, "best"), **tables))
    save, state = trainer.checkpointer.manager.save, trainer.train_state
    losses = {2: 3.0, 4: 2.0, 14: math.nan}

    def fail(step: int, *rest: Any) -> Any:
        if step == 4:
            raise CheckpointError("the disk is full")
        return save(step, *rest)

    trainer.checkpointer.manager.save = fail  # type: ignore[method-assign]
    validate.validate = lambda *_, **__: {"loss": losses.get(state.step, 9.0)}  # type: ignore[assignment]
    trainer.train()
    kept = committed_steps(trainer.checkpointer.manager.folder)
    run = read_manifest(trainer.checkpointer.step_folder)["run"]
    return kept, run["best_validation"], run["best_step"]


@pytest.fixture(scope="module")
def failing_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(_failing_run, 2, str(tmp_path_factory.mktemp("failing")))[0]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_does_not_end_training(failing_runs: dict[str, Any], mode: str) -> None:
    code, step, steps, said = failing_runs[f"{mode} in between"]
    assert (code, step, steps) == (0, 6, [6])
    assert len(said) == 2
    assert "step 2 was not saved" in said[0] and "No space left" in said[0]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_whose_last_save_fails_has_failed(failing_runs: dict[str, Any], mode: str) -> None:
    code, step, steps, _ = failing_runs[f"{mode} to the end"]
    assert "step 6 was not saved" in code
    assert (step, steps) == (6, [])


def test_the_best_step_that_could_be_saved_is_kept(failing_runs: dict[str, Any]) -> None:
    assert failing_runs["best"] == ([2, 8], 3.0, 2)


def test_a_best_step_is_one_of_the_samples_that_are_validated_on(failing_runs: dict[str, Any]) -> None:
    assert failing_runs["best, resumed"] == ([2, 10], 3.0, 2)
    assert failing_runs["best of others"] == ([12], 9.0, 12)


def test_a_loss_that_is_no_number_is_not_the_best(failing_runs: dict[str, Any]) -> None:
    assert failing_runs["best beside a NaN"] == ([16], 9.0, 16)


def test_a_best_step_that_is_gone_is_chosen_anew(failing_runs: dict[str, Any]) -> None:
    assert failing_runs["best that is gone"] == ([20], 9.0, 20)


def _stopped_in_a_save(folder: str) -> tuple[int, list[int], list[int]]:
    """A signal to one rank while step 3 is written, which lasts until the run waits for it."""
    config = small_config(
        folder, training={"steps": 50}, checkpoint={"enable": True, "interval": 3, "async_mode": "async"}
    )
    trainer = small_trainer(config)
    commit, end, waited_for = (
        manager_module.commit_folder,
        trainer.checkpointer.manager.end_save,
        threading.Event(),
    )
    committed: list[int] = []

    def slow_commit(*arguments: Any) -> None:
        waited_for.wait(60)
        commit(*arguments)
        committed.append(trainer.train_state.step)

    def end_save(*, wait: bool) -> None:
        if wait and trainer.train_state.step > 3:
            waited_for.set()
        elif not wait and trainer.train_state.step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        end(wait=wait)

    manager_module.commit_folder = slow_commit
    trainer.checkpointer.manager.end_save = end_save  # type: ignore[method-assign]
    code = trainer.train()
    return code, committed_steps(Path(folder, "checkpoint")), committed


def test_a_signal_in_a_save_waits_for_it_and_saves_where_it_stopped(tmp_path: Path) -> None:
    ranks = run_world(_stopped_in_a_save, 2, str(tmp_path))
    assert [(code, steps) for code, steps, _ in ranks] == [(75, [3, 5])] * 2
    assert ranks[0][2] == [5, 5]  # both were committed after the stop
