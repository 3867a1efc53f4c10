"""Any region of a tensor, from any form of the files, is that of the whole tensor as others read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.weights.stories import ASSETS, needs_assets
from toolkit.io import tensor_file
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource

pytestmark = needs_assets
META = ASSETS / "stories260K/meta"
COLUMNS = ("wo.weight", "w2.weight")
REPLICATED = ("norm.weight", "rope.freqs")
# How many parts, and along which dimension they split the embedding: Llama 3's, Llama 2's.
PARTS = [(1, 0), (2, 1), (4, 0), (8, 1), (16, 0)]


def split(folder: Path, parts: int, embedding_axis: int) -> Path:
    """stories260K in several parts, as tensor parallelism of so many ranks would hold it. Beyond its four
    key/value heads neighbours hold the same one."""
    folder.mkdir()
    shutil.copy(META / "params.json", folder)
    whole = torch.load(META / "consolidated.00.pth")

    def piece(name: str, tensor: Tensor, part: int) -> Tensor:
        if name.endswith(REPLICATED):
            return tensor
        count = parts
        if name.endswith(("wk.weight", "wv.weight")):
            count, part = min(parts, 4), part * min(parts, 4) // parts
        axis = embedding_axis if name.startswith("tok_emb") else int(name.endswith(COLUMNS))
        return torch.tensor_split(tensor, count, axis)[part].clone()

    for part in range(parts):
        pieces = {name: piece(name, tensor, part) for name, tensor in whole.items()}
        torch.save(pieces, folder / f"consolidated.{part:02}.pth")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[WeightSource]:
    folder = tmp_path_factory.mktemp("parts")
    found: list[WeightSource] = [SafetensorsFolder(ASSETS / "stories260K/hf")]
    return found + [MetaFolder(split(folder / f"{parts}", parts, axis)) for parts, axis in PARTS]


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return torch.load(META / "consolidated.00.pth")


def test_every_form_holds_the_same_tensors(sources: list[WeightSource], whole: dict[str, Tensor]) -> None:
    for source in sources:
        assert set(source.tensors) == set(whole) - {"output.weight"}  # tied
        assert source.args == sources[0].args
        for name, stored in source.tensors.items():
            assert (stored.shape, stored.dtype) == (tuple(whole[name].shape), torch.float32)
            assert torch.equal(source.read(name), whole[name]), (source.place, name)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_region_of_any_tensor(
    data: st.DataObject,
    sources: list[WeightSource],
    whole: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some rows or one head: what is larger goes by several buffers.
    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", data.draw(st.sampled_from([1, 3000, 1 << 20])))
    source = data.draw(st.sampled_from(sources))
    name = data.draw(st.sampled_from(sorted(source.tensors)))
    region = []
    for size in source.tensors[name].shape:
        start = data.draw(st.integers(0, size))
        region.append(slice(start, data.draw(st.integers(start, size))))
    expected = whole[name][tuple(region)]
    out = torch.full(expected.shape, float("nan"))
    assert source.read(name, region, out) is out
    assert torch.equal(out, expected)
