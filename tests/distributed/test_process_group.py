"""The device of a rank, that for which the checks before the start were made or a refusal, and its groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import free_port, run_world
from toolkit.distributed import process_group
from toolkit.distributed.process_group import local_device
from toolkit.errors import DeviceError
from toolkit.parallel.mesh import build_mesh

ROOT = Path(__file__).parents[2]


def _sees(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_what_was_checked_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, 0)
    assert local_device("cpu") == local_device() == torch.device("cpu")
    _sees(monkeypatch, 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == local_device() == torch.device("cuda", 3)


def _refused(checked: str) -> str:
    with pytest.raises(DeviceError) as caught:
        local_device(checked)
    return str(caught.value)


def test_gpus_that_torch_cannot_use_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    told = _refused("cuda")
    assert "a build without CUDA" in told and "install torch's build for CUDA" in told
    assert "--training.device cpu" in told

    def old_driver() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore words")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    told = _refused("cuda")
    assert "too old (found version 11040)" in told and "More" not in told and "driver for CUDA 13.0" in told


def test_gpus_that_the_checks_did_not_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, 2)
    assert "nvidia-smi shows no GPU, but torch finds 2" in _refused("cpu")


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert "local rank 2 has no GPU: torch finds 2" in _refused("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
@pytest.mark.parametrize(("device", "code"), [("auto", 2), ("cpu", 0)])
def test_no_run_says_gpu_and_trains_on_the_cpu(device: str, code: int, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H100, 9.0, 81559'\n")
    tool.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ended = subprocess.run(
        [
            sys.executable, "-m", "toolkit.launch", "--job.config_file=train_configs/debug_model.toml",
            "--model.dim=64", "--model.n_layers=1", "--model.n_heads=4", "--training.seq_len=64",
            "--training.dataset=embedded_validation", "--training.steps=1", "--training.global_batch_size=2",
            "--validation.enable=false", "--checkpoint.enable=false", f"--training.device={device}",
            f"--job.dump_folder={tmp_path}",
        ],
        cwd=ROOT,
        env=environment | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NGPU": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.count("torch cannot use them") == (code == 2)
    assert ("on NVIDIA H100" in ended.stdout) == (device == "auto") and ("step 1/1" in ended.stdout) == (
        code == 0
    )


def _threads_of_groups() -> list[int]:
    build_mesh(torch.device("cpu"), pp=2, tp=2)
    process_group.new_file_group(timeout_seconds=60)
    groups = list(dist.distributed_c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


_WAIT = """
import torch
from toolkit.distributed import process_group
process_group._WARN_AFTER = 0.2
process_group.start(torch.device("cpu"), timeout_seconds=2)
"""


@pytest.mark.parametrize(("rank", "awaited"), [("0", "some of the ranks 1 to 2"), ("2", "rank 0")])
def test_a_rank_that_waits_says_for_whom_and_where(rank: str, awaited: str) -> None:
    port = free_port()
    place = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environ = os.environ | place | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", _WAIT], env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode
    assert f"rank {rank} of 3 waits for {awaited} at localhost:{port}; start each" in ended.stderr


def test_each_gloo_group_has_one_worker_thread() -> None:
    for threads in run_world(_threads_of_groups, 4):
        # Those of all ranks, of each dimension of the mesh, and for files.
        assert len(threads) >= 4 and set(threads) == {1}


def _group_for_files_beside_a_gpu() -> str:
    process_group.stop()
    store = dist.HashStore()
    # As on a GPU, where nccl is in the place of the second gloo.
    dist.init_process_group(f"cpu:{process_group.GLOO},cuda:gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    group = process_group.new_file_group(timeout_seconds=60)
    process_group.set_timeout(30, except_for=group)
    dist.all_reduce(torch.ones(1), group=group)
    return dist.get_backend(group)


def test_a_group_for_files_is_formed_beside_a_gpu() -> None:
    assert run_world(_group_for_files_beside_a_gpu, 1) == [process_group.GLOO]


def test_a_second_group_of_a_process_knows_its_ranks() -> None:
    code = """
import torch, torch.distributed as dist
from toolkit.distributed import process_group
for _ in range(2):
    process_group.start(torch.device("cpu"), timeout_seconds=30)
    gloo = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    print(gloo.options.global_ranks_in_group)
    process_group.stop()
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    # An empty list crashes where a group is split from it, as torch does with a group that is bound to a GPU.
    assert ended.stdout.split() == ["[0]", "[0]"]
