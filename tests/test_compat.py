"""Private names of torch stand in one file and exist; stand-ins for Python 3.10 do what later versions do."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from toolkit import compat
from toolkit.compat import PRIVATE, file_digest

ROOT = Path(compat.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
NOT_TORCH = {
    "_current_frames", "_exit", "_expected_crc", "_getframe", "_replace",  # of Python
    "_data", "_fingerprint", "_scale", "_strip_protocol",  # of torchao, datasets and fsspec
    "_hidden",  # of a pipeline
}  # fmt: skip
"""Private attributes that are used in other files than those that define them."""


def _is_private(path: str) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in path.split("."))


def _defined(tree: ast.AST) -> set[str]:
    """Names of functions, classes and variables, and of what objects are given of their own."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def _private_names(tree: ast.AST, inherited: set[str]) -> Iterator[str]:
    """Each private import from torch, and each private attribute that neither the file nor, of objects of its
    own, another one defines."""
    own = _defined(tree) | NOT_TORCH
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                yield from (f"{module}.{it.name}" for it in names if _is_private(f"{module}.{it.name}"))
            case ast.Import(names=names):
                yield from (it.name for it in names if it.name.startswith("torch.") and _is_private(it.name))
            case ast.Attribute(value=of, attr=name) if _is_private(name):
                of_self = ast.unparse(of) in ("self", "cls", "super()")
                if name not in (own | inherited if of_self else own):
                    yield ast.unparse(node)


def test_private_names_of_torch_stand_in_one_file() -> None:
    inherited = set().union(*map(_defined, TREES.values()))
    others = {path: tree for path, tree in TREES.items() if path != "compat.py"}
    assert not [
        f"{path}: {name}" for path, tree in others.items() for name in _private_names(tree, inherited)
    ]


@pytest.mark.parametrize("code", ["import torch._dynamo", "from torch.optim import _muon", "x.y._cdata"])
def test_a_private_name_elsewhere_is_found(code: str) -> None:
    assert list(_private_names(ast.parse(code), set()))
    assert not list(
        _private_names(ast.parse("import torch.nn\nself._own = 1\nx._own\nself._others"), {"_others"})
    )


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_name_exists_and_is_used(name: str) -> None:
    assert getattr(compat, name) is not None
    imports = (node for tree in TREES.values() for node in ast.walk(tree))
    assert any(
        (isinstance(node, ast.ImportFrom) and any(it.name == name for it in node.names))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == f"compat.{name}")
        or (isinstance(node, ast.Constant) and node.value == name and name == "inductor_config")
        for node in imports
    )


def test_private_attributes_exist() -> None:
    tensor = torch.ones(2)
    module = torch.nn.Linear(2, 2)
    assert compat.parameter(module, "weight") is module.weight
    assert compat.checkpointed(compat.checkpoint_wrapper(module)) is module
    assert compat.operator_schema(torch.ops.aten.mm.default).name == "aten::mm"
    assert {"gloo", "nccl"} >= {name for name in ("gloo", "nccl") if compat.recorded_collectives(name)}
    from torch.distributed.pipelining.schedules import get_schedule_class

    actions = compat.schedule_actions(get_schedule_class("Interleaved1F1B"), 2, 4, 4)
    assert len(actions) == 2 and all(actions)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(tensor, mesh)
        part = compat.local_tensor(sharded)
        assert compat.dtensor_like(part, sharded).placements == sharded.placements
        assert len(compat.process_groups()) >= 1
        assert compat.fsdp_param_group(torch.distributed.fsdp.fully_shard(module)) is not None
    finally:
        dist.destroy_process_group()


def test_functional_collectives_are_waited_for_in_one_file() -> None:
    users = {path for path, tree in TREES.items() if "functional_collectives" in ast.unparse(tree)}
    assert users == {"compat.py", "distributed/collectives.py"}


def test_torch_is_patched_in_one_place() -> None:
    assert "only patch of torch" in (inspect.getdoc(compat.replace_work_wait) or "")
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and path != "compat.py":
                assert not ast.unparse(node).startswith(("torch.", "dist.")) or "cudnn" in ast.unparse(node)
                assert node.attr != "__class__", path


def test_the_digest_of_a_file_of_several_blocks(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2000 + b"the rest"
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb") as file:
        assert file_digest(file, "sha256").hexdigest() == hashlib.sha256(content).hexdigest()
