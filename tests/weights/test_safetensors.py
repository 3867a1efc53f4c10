"""Experts of a Hugging Face folder: read one by one, and reported by their names there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers import run_world
from tests.models.families import save_transformers
from toolkit.errors import DataError
from toolkit.io import tensor_file
from toolkit.models.parameters import table
from toolkit.weights.load import load_weights
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.views import check_complete

EXPERT = "model.layers.2.mlp.experts.{}.{}_proj.weight"


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that are read from files."""
    read, counts = tensor_file._preadv, []

    def counted(*arguments: Any) -> int:
        counts.append(read(*arguments))
        return counts[-1]

    with mock.patch.object(tensor_file, "_preadv", counted):
        yield counts


def test_a_region_reads_its_experts_and_rows_alone(tmp_path: Path) -> None:
    save_transformers(tmp_path, "qwen3_moe")
    source, published = SafetensorsFolder(tmp_path), load_file(tmp_path / "model.safetensors")
    for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        stacked = torch.stack([published[EXPERT.format(expert, part)] for expert in range(8)])
        name = f"layers.2.moe.experts.{name}"
        assert source.tensors[name].shape == stacked.shape and source.read(name).equal(stacked)
        rows, columns = stacked.shape[1:]
        for region in (
            (slice(3, 5), slice(0, rows), slice(0, columns)),
            (slice(0, 8), slice(7, 12), slice(0, columns)),
            (slice(7, 8), slice(5, 6), slice(2, 9)),
            (slice(4, 4), slice(0, rows), slice(0, columns)),
        ):
            with counted_bytes() as counts:
                assert source.read(name, region).equal(stacked[region])
            experts, lines, _ = (it.stop - it.start for it in region)
            assert sum(counts) == experts * lines * columns * 4


def _read_a_shard(folder: Path, dim: int) -> int:
    """Load a model whose experts are sharded along ``dim``; the number of bytes that this rank read."""
    source, mesh = SafetensorsFolder(folder), init_device_mesh("cpu", (2,))
    rows = table(source.args)
    tensors = {
        name: distribute_tensor(
            torch.full(row.shape, torch.nan), mesh, [Shard(dim) if row.experts else Replicate()]
        )
        for name, row in rows.items()
    }
    with counted_bytes() as counts:
        load_weights(source, tensors)
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor) and tensor.full_tensor().equal(source.read(name)), name
    return sum(counts)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_shards_of_experts_alone(dim: int, tmp_path: Path) -> None:
    save_transformers(tmp_path, "qwen3_moe")
    rows = table(SafetensorsFolder(tmp_path).args).values()
    experts = sum(row.size for row in rows if row.experts)
    others = sum(row.size for row in rows if not row.experts)
    assert run_world(_read_a_shard, 2, tmp_path, dim) == [4 * (experts // 2 + others)] * 2


def _without_two(tensors: dict[str, Tensor]) -> None:
    del tensors[EXPERT.format(3, "gate")], tensors[EXPERT.format(0, "down")]


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT.format(7, "up")] = torch.zeros(39, 64)


def _half(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT.format(0, "up")] = torch.zeros(40, 64).half()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _without_two,
            ["missing: ", "model.layers.2.mlp.experts.3.gate_proj.weight", EXPERT.format(0, "down")],
        ),
        (
            _narrow,
            ["of another shape: model.layers.2.mlp.experts.7.up_proj.weight (39, 64) instead of (40, 64)"],
        ),
        (
            _half,
            ["of another dtype: model.layers.2.mlp.experts.0.up_proj.weight float16 instead of float32"],
        ),
    ],
)
def test_experts_that_cannot_be_stacked_are_reported(
    change: Callable[[dict[str, Tensor]], None], says: list[str], tmp_path: Path
) -> None:
    save_transformers(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as caught:
        SafetensorsFolder(tmp_path)
    assert all(text in str(caught.value) for text in says)


def test_unknown_experts_and_layers_without_any_are_reported(tmp_path: Path) -> None:
    save_transformers(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    for expert in range(8):
        del tensors[EXPERT.format(expert, "gate")]
    for expert in ("8", "03"):
        tensors[EXPERT.format(expert, "gate")] = torch.zeros(40, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError) as caught:
        check_complete(SafetensorsFolder(tmp_path))
    assert "missing: layers.2.moe.experts.w1" in str(caught.value)
    for expert in ("8", "03"):
        assert f"model.layers.2.mlp.experts.{expert}.gate_proj.weight (not of" in str(caught.value)
