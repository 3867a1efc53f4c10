"""Single tensors of checkpoints, whole and by region, whoever saved them."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.helpers import run_world
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.reading import CheckpointTensors
from toolkit.errors import CheckpointError


def _full() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "model.matrix": torch.randn(13, 10, generator=generator),
        "model.half": torch.randn(9, generator=generator).bfloat16(),
        "optim.step": torch.tensor(3.0),
    }


def _save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placed = {
        name: distribute_tensor(tensor, mesh, [Shard(0), Shard(tensor.dim() - 1)])
        if tensor.dim() == 2
        else tensor
        for name, tensor in _full().items()
    }
    CheckpointManager(folder).save(4, placed, {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sharded, whole = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("whole")
    run_world(_save_sharded, 4, str(sharded))
    CheckpointManager(whole).save(4, _full(), {})
    return [sharded / "step-4", whole / "step-4"]


def test_every_region_is_that_of_the_whole_tensor(folders: list[Path]) -> None:
    cuts = [slice(0, 13), slice(6, 8), slice(12, 13), slice(3, 3)]
    columns = [slice(0, 10), slice(4, 6), slice(9, 10)]
    for folder in folders:
        held, full = CheckpointTensors(folder), _full()
        assert set(held.tensors) == set(full)
        for name, tensor in full.items():
            assert held.read(name).equal(tensor) and held.read(name).dtype == tensor.dtype
        for rows, cols in product(cuts, columns):
            assert held.read("model.matrix", (rows, cols)).equal(full["model.matrix"][rows, cols])
        out = torch.zeros(2, dtype=torch.bfloat16)
        assert held.read("model.half", (slice(4, 6),), out) is out and out.equal(full["model.half"][4:6])


def test_what_is_damaged_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, _full(), {})
    path = tmp_path / "step-1" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="__0_0.distcp was altered"):
        CheckpointTensors(tmp_path / "step-1")
    CheckpointTensors(tmp_path / "step-1", verify=False)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="__0_0.distcp has .* bytes instead of"):
        CheckpointTensors(tmp_path / "step-1", verify=False)
