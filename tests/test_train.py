"""How the entry point ends: which rank tells the user of a mistake, and what is counted as training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit.validate
from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit import train
from toolkit.errors import EXIT_DATA, EXIT_ERROR, DataError, OutOfMemory, ToolkitError, TrainingError
from toolkit.launcher.environment import SUPERVISED


@pytest.mark.parametrize(
    ("error", "shown", "code", "tells"),
    [
        (OutOfMemory("the device is full"), "", EXIT_ERROR, True),
        (DataError("the device is full"), "", EXIT_DATA, True),
        (TrainingError("the device is full"), "", EXIT_ERROR, False),  # agreed upon: rank 0 tells
        (TrainingError("the device is full"), "0,1", EXIT_ERROR, False),
        (TrainingError("the device is full"), "1", EXIT_ERROR, True),  # which nobody would hear
        (TrainingError("the device is full"), "all", EXIT_ERROR, False),
    ],
)
def test_a_rank_tells_what_it_may_be_alone_with(
    error: ToolkitError,
    shown: str,
    code: int,
    tells: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def failing(*_: Any) -> int:
        raise error

    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", SUPERVISED: "1"}
    place["LOG_RANK"] = shown
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "_train", failing)
    assert train.main([f"--job.dump_folder={tmp_path}"]) == code
    assert ("the device is full" in capsys.readouterr().err) == tells


def _compiling_in_validation(folder: Path) -> list[dict[str, Any]]:
    """The history of a run whose validation compiles for 1,000 seconds by the clock of compilation."""
    config = small_config(
        folder,
        training={"steps": 3},
        validation={"enable": True, "freq": 1, "steps": 1, "seq_len": 64, "local_batch_size": 2},
    )
    trainer, compiled, validate = small_trainer(config), [0.0], toolkit.validate.validate

    def compiling(*args: Any, **options: Any) -> Any:
        compiled[0] += 1000.0
        return validate(*args, **options)

    def take() -> float:
        seconds, compiled[0] = compiled[0], 0.0
        return seconds

    toolkit.validate.validate, trainer.compile_clock = compiling, take
    trainer.train()
    return trainer.history


def _out_of_memory(folder: Path) -> str:
    trainer = small_trainer(small_config(folder, training={"steps": 3}))

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    trainer.train_step = full  # type: ignore[assignment]
    with pytest.raises(OutOfMemory) as error:
        trainer.train()
    return str(error.value)


def _world(folder: Path) -> tuple[list[dict[str, Any]], str]:
    return _compiling_in_validation(folder / "compiling"), _out_of_memory(folder / "full")


def test_what_belongs_to_no_step(tmp_path: Path) -> None:
    ((history, said),) = run_world(_world, 1, tmp_path)
    steps = [record for record in history if "loss" in record]
    # Those seconds passed within validation, and would leave less than nothing for the steps.
    assert [record["step"] for record in steps if record["step_seconds"] > 0] == [1, 2, 3]
    assert not any("compile_seconds" in record for record in steps)
    assert said.startswith("step 1: out of memory on cpu while allocating 20.00 GiB")


@pytest.mark.parametrize(
    ("environ", "becomes"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}),
    ],
)
def test_segments_grow_unless_the_environment_says_otherwise(
    environ: dict[str, str], becomes: dict[str, str]
) -> None:
    train.use_expandable_segments(environ)
    assert environ == becomes
