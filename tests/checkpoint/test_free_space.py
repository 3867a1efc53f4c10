"""Storage that will not take a checkpoint is told before the first step."""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import run_world
from tests.s3_server import running
from tests.training import MESHES, small_config, small_trainer
from toolkit.checkpoint import free_space
from toolkit.checkpoint.manifest import read_manifest, step_folder
from toolkit.errors import CheckpointError
from toolkit.storage.remote_path import RemotePath

Usage = namedtuple("Usage", "total used free")


def _sizes(folder: str) -> dict[str, Any]:
    """The bytes that the check counts with, those that a save wrote, and what it says where less is free."""
    found: dict[str, Any] = {}
    for name, mesh in MESHES.items():
        config = small_config(
            f"{folder}/{name}",
            training={"steps": 1, "local_batch_size": 4},
            parallelism=mesh,
            checkpoint={"enable": True},
        )
        trainer = small_trainer(config)
        saver = trainer.checkpointer
        assert saver
        stages = config.parallelism.pipeline_parallel_degree
        tensors = saver.tensors(model_only=False).values()
        counted = free_space.checkpoint_bytes(tensors, stages=stages, group=trainer.file_group)
        trainer.train()
        written = read_manifest(step_folder(saver.manager.folder, 1))["tensors"]["bytes"]
        found[name] = {"counted": counted, "written": written, "told": []}
        for free in (written - 1, written):
            free_space.shutil.disk_usage = lambda path, free=free: Usage(
                0, 0, free if dist.get_rank() == 0 else 0
            )
            try:
                saver.restore()
            except CheckpointError as error:
                found[name]["told"].append(str(error))
    return found


def test_a_checkpoint_that_has_no_room_is_refused_by_its_size(tmp_path: Path) -> None:
    for found in run_world(_sizes, 2, str(tmp_path)):
        for name in MESHES:
            assert found[name]["counted"] == found[name]["written"]
            (told,) = found[name]["told"]
            assert "a checkpoint of this run takes" in told and "checkpoint has" in told


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to .*Invalid argument"):
        free_space._free_bytes(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to"):
        free_space._free_bytes(tmp_path / "file" / "checkpoint")


def test_object_storage_takes_a_small_object(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert free_space._free_bytes(RemotePath("s3://bucket/run/checkpoint")) == sys.maxsize
        assert list(RemotePath("s3://bucket/run/checkpoint").iterdir()) == []
