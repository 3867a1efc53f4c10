"""Any layout loads what any other saved, and all ranks share each failure: one world of four ranks."""

import errno
import math
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers import run_world
from toolkit.checkpoint import dcp_storage
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.errors import CheckpointError

# (7, 5), (3,) and (1, 4) leave some ranks of four with fewer rows or none
SHAPES = {
    "model.a": (7, 5),
    "model.b": (3,),
    "model.c": (1, 4),
    "model.d": (130, 8),
    "model.big": (512, 256),
    "optim.a.exp_avg": (7, 5),
}
LAYOUTS = ("fsdp4", "fsdp2", "hsdp2x2", "tensor2x2", "one")


def _full() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return full | {"model.half": full["model.d"].bfloat16(), "optim.a.step": torch.tensor(41.0)}


class _World:
    """The layouts over four ranks: mesh, placements, and the group of those that take part."""

    def __init__(self):
        pair, alone = dist.new_group([0, 1]), dist.new_group([0])
        square = init_device_mesh("cpu", (2, 2))
        line = init_device_mesh("cpu", (4,))
        self.layouts = {
            "fsdp4": (line, [Shard(0)], None),
            "fsdp2": (DeviceMesh("cpu", [0, 1]), [Shard(0)], pair),
            "hsdp2x2": (square, [Replicate(), Shard(0)], None),
            "tensor2x2": (square, [Shard(0), Shard(-1)], None),
            "one": (DeviceMesh("cpu", [0]), [Shard(0)], alone),
        }

    def takes_part(self, name: str) -> bool:
        return self.layouts[name][0].get_coordinate() is not None

    def manager(self, name: str, folder: Path, **options) -> CheckpointManager:
        return CheckpointManager(folder, group=self.layouts[name][2], **options)

    def tensors(self, name: str, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mesh, placements, _ = self.layouts[name]

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0:
                return tensor.clone()
            dims = [Shard(tensor.dim() - 1) if p == Shard(-1) else p for p in placements]
            if tensor.dim() == 1 and len(dims) == 2 and dims[0] == dims[1]:
                dims[1] = Replicate()
            return distribute_tensor(tensor.clone(), mesh, dims)

        return {key: place(tensor) for key, tensor in full.items()}


def _reshard(world: _World, folder: Path) -> list[str]:
    """Which of all ordered pairs of layouts do not give back every bit."""
    wrong = []
    for source in LAYOUTS:
        if world.takes_part(source):
            world.manager(source, folder / source).save(1, world.tensors(source, _full()), {"layout": source})
        dist.barrier()
    for source, target in product(LAYOUTS, LAYOUTS):
        if not world.takes_part(target):
            continue
        zeros = {name: torch.zeros_like(tensor) for name, tensor in _full().items()}
        loaded = world.tensors(target, zeros)
        manifest = world.manager(target, folder / source).load(-1, loaded)
        assert manifest["run"] == {"layout": source}
        expected = world.tensors(target, _full())
        for name, tensor in loaded.items():
            mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
            if not torch.equal(mine, theirs):
                wrong.append(f"{source} -> {target}: {name}")
    dist.barrier()
    return wrong


class _FullDisk(dcp_storage._HashingStream):
    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _message(call) -> str:
    with pytest.raises(CheckpointError) as error:
        call()
    return str(error.value)


def _failures(world: _World, folder: Path) -> dict[str, str]:
    rank, messages = dist.get_rank(), {}
    manager = world.manager("fsdp4", folder)
    tensors = world.tensors("fsdp4", _full())
    manager.save(1, tensors, {})

    original = dcp_storage._HashingStream
    if rank == 2:
        dcp_storage._HashingStream = _FullDisk
    messages["one disk is full"] = _message(lambda: manager.save(2, tensors, {}))
    dcp_storage._HashingStream = original

    uneven = dict(tensors)
    if rank == 3:
        uneven["model.only_here"] = torch.zeros(2)
        uneven["optim.a.step"] = torch.zeros(3)
    messages["one rank does not fit"] = _message(lambda: manager.load(1, uneven))

    dist.barrier()
    if rank == 0:
        shutil.copytree(folder / "step-1", folder / "step-9")
        (folder / "step-1" / "__2_0.distcp").unlink()
    dist.barrier()
    messages["a file is missing"] = _message(lambda: manager.load(1, tensors))
    messages["another step's folder"] = _message(lambda: manager.load(9, tensors))
    messages["what is left"] = " ".join(sorted(path.name for path in folder.iterdir()))
    return messages


def _pipeline(world: _World, folder: Path) -> str | None:
    """Ranks that hold different names: each asks for its own, together for all."""
    manager = world.manager("fsdp4", folder)
    mine = {name: tensor for i, (name, tensor) in enumerate(_full().items()) if i % 4 == dist.get_rank()}
    manager.save(1, mine, {})
    target = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    manager.load(1, target)
    assert all(torch.equal(target[name], mine[name]) for name in mine)
    if dist.get_rank() == 1:
        del target["model.b"]
    return _message(lambda: manager.load(1, target))


def _all(folder: str):
    world, base = _World(), Path(folder)
    wrong = _reshard(world, base / "reshard")
    return wrong, _failures(world, base / "failures"), _pipeline(world, base / "pipeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reshard")


@pytest.fixture(scope="module")
def results(folder):
    return run_world(_all, 4, str(folder), timeout=90)


def test_every_pair_of_layouts_is_bit_for_bit(results):
    assert [wrong for wrong, _, _ in results] == [[]] * 4


def test_replicas_are_written_once(results, folder):
    content = sum(math.prod(shape) * 4 for shape in SHAPES.values()) + 130 * 8 * 2 + 4
    written = sum(
        path.stat().st_size for path in (folder / "reshard" / "hsdp2x2" / "step-1").glob("*.distcp")
    )
    # torch's container adds about 1.3 kB to each of the 16 pieces; a second copy would add 550 kB
    assert content <= written < content + 16 * 2048


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("one disk is full", "rank 2: [Errno 28] No space left on device"),
        ("one rank does not fit", "not in the checkpoint: model.only_here"),
        ("one rank does not fit", "optim.a.step () in the checkpoint, (3,) in the model"),
        ("a file is missing", "__2_0.distcp is missing"),
        ("another step's folder", "is of step 1"),
    ],
)
def test_what_fails_on_one_rank_fails_alike_on_all(results, case, said):
    messages = [failures[case] for _, failures, _ in results]
    assert len(set(messages)) == 1
    assert said in messages[0]


def test_a_failed_save_leaves_no_trace(results):
    assert results[0][1]["what is left"] == "step-1 step-9"


def test_ranks_may_hold_different_names_but_together_all(results):
    assert {message.splitlines()[-2] for _, _, message in results} == {
        "  in the checkpoint but not in this model: model.b"
    }
