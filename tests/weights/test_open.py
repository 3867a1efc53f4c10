"""Weights on disk by region, whoever saved them, and what is said where there are none."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.helpers import run_world
from tests.models.small_llama import small
from tests.weights.folders import save_transformers
from toolkit.checkpoint import manifest
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, DataError
from toolkit.generation.load import LoadedModel, load_model
from toolkit.loss import IGNORED_LABEL
from toolkit.models.common.args import MoEArgs
from toolkit.weights.load import open_on_all_ranks
from toolkit.weights.open import CheckpointWeights, open_weights

RUN = {"model": asdict(small())}
WEIGHTS, INDEX, MISTRAL = "model.safetensors", "model.safetensors.index.json", "consolidated.safetensors"
Change = Callable[[Path, dict[str, torch.Tensor]], None]


def _full() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "model.matrix": torch.randn(13, 10, generator=generator),
        "model.half": torch.randn(9, generator=generator).bfloat16(),
        "optim.matrix.step": torch.tensor(3.0),
    }


def _save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placed = {
        name: distribute_tensor(tensor, mesh, [Shard(0), Shard(tensor.dim() - 1)]) if tensor.dim() else tensor
        for name, tensor in _full().items()
    }
    CheckpointManager(folder).save(4, placed, RUN)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sharded, whole = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("whole")
    run_world(_save_sharded, 4, str(sharded))
    CheckpointManager(whole).save(4, _full(), RUN)
    return [sharded, whole]


def test_every_region_of_a_checkpoint_is_that_of_the_whole_tensor(folders: list[Path]) -> None:
    cuts = [slice(0, 13), slice(6, 8), slice(12, 13), slice(3, 3)]
    columns = [slice(0, 10), slice(4, 6), slice(9, 10)]
    matrix, half = _full()["model.matrix"], _full()["model.half"]
    for folder in folders:
        source = open_weights(folder)
        assert set(source.tensors) == {"matrix", "half"} and source.args == small()
        assert source.read("matrix").equal(matrix)
        assert source.read("half").equal(half) and source.read("half").dtype == torch.bfloat16
        for rows, cols in product(cuts, columns):
            assert source.read("matrix", (rows, cols)).equal(matrix[rows, cols])
        out = torch.zeros(2, dtype=torch.bfloat16)
        assert source.read("half", (slice(4, 6),), out) is out and out.equal(half[4:6])


def test_a_checkpoint_that_was_altered_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, _full(), RUN)
    path = tmp_path / "step-1" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="__0_0.distcp was altered"):
        open_weights(tmp_path / "step-1")
    open_weights(tmp_path / "step-1", verify=False)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="__0_0.distcp has .* bytes instead of"):
        open_weights(tmp_path / "step-1", verify=False)


def _hashed(folder: str, altered: str) -> tuple[list[str], str]:
    """The files that this rank hashes, and the error of all."""
    with mock.patch.object(manifest, "_has_hash", side_effect=manifest._has_hash) as hashed:
        open_on_all_ranks(lambda: open_weights(folder, ranks=Ranks()))
    with pytest.raises(DataError) as error:
        open_on_all_ranks(lambda: open_weights(altered, ranks=Ranks()))
    return [call.args[0].name for call in hashed.call_args_list], str(error.value)


def test_of_several_ranks_each_hashes_its_share(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "run")
    [step] = (tmp_path / "run").glob("step-*")
    path = step / "__3_0.distcp"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (first, said), (second, too) = run_world(_hashed, 2, str(folders[0]), str(step))
    assert set(first) & set(second) == {".metadata"} and len(first) == len(second) == 3
    assert "__3_0.distcp was altered" in said and said == too


def test_a_folder_of_checkpoints_stands_for_its_newest(tmp_path: Path) -> None:
    for step in (2, 10):
        CheckpointManager(tmp_path / "run" / "checkpoint").save(step, _full(), RUN)
    (tmp_path / "run" / "checkpoint" / "step-11").mkdir()
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint", tmp_path / "run/checkpoint/step-10"):
        source = open_weights(folder)
        assert isinstance(source, CheckpointWeights) and source.place.name == "step-10"


def test_a_run_may_call_the_folder_of_its_checkpoints_as_it_likes(tmp_path: Path) -> None:
    for name, step in (("mine", 4), ("hf", 9)):
        CheckpointManager(tmp_path / name).save(step, _full(), RUN)
    assert open_weights(tmp_path).place == tmp_path / "mine/step-4"
    (tmp_path / "config.json").touch()  # a Hugging Face folder, in which something converted lies
    with pytest.raises(DataError, match="a config but no weights"):
        open_weights(tmp_path)


def test_what_holds_no_weights_is_told_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(path: Path | str, kind: type[Exception] = DataError) -> str:
        with pytest.raises(kind) as error:
            open_weights(path)
        return str(error.value)

    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        message = said(path)
        assert all(name in message for name in ("config.json", "consolidated.00.pth", "step-N"))
    hint = "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"
    assert hint in said("meta-llama/Llama-3.2-1B") and "hf download" not in said(tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "file").touch()
    assert "hf download" not in said("empty/file")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "a config but no weights" in said(tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").touch()
    assert "save the model as safetensors" in said(tmp_path / "empty")
    CheckpointManager(tmp_path / "half").save(1, _full(), {})
    assert "has no valid model args" in said(tmp_path / "half", CheckpointError)
    (tmp_path / "half" / "step-1" / "manifest.json").unlink()
    assert "no committed checkpoint" in said(tmp_path / "half", CheckpointError)


@pytest.mark.skipif("TOOLKIT_ASSETS" not in os.environ, reason="TOOLKIT_ASSETS is not set")
def test_one_model_in_two_formats_is_the_same_weights(tmp_path: Path) -> None:
    stories = Path(os.environ["TOOLKIT_ASSETS"]) / "stories260K"
    theirs, metas = open_weights(stories / "hf"), open_weights(str(stories / "meta"))
    assert theirs.tensors == metas.tensors
    for name in theirs.tensors:
        assert theirs.read(name).equal(metas.read(name)), name
    shutil.copytree(stories / "meta", tmp_path / "both")
    shutil.copytree(stories / "hf", tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(DataError, match="a model in two formats, model.safetensors and consolidated.00.pth"):
        open_weights(tmp_path / "both")


# What others write, beside what transformers makes of it


def _untied(rows: slice) -> Change:
    """A stored head that differs from the embedding in ``rows``, although config.json ties the two."""

    def change(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][rows] += 1

    return change


def _says_so(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    _untied(slice(40, 41))(folder, tensors)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))


def _head_alone(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def _buffers(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.position_ids"] = torch.arange(9)
    tensors["model.mask"] = torch.ones(3, 3, dtype=torch.bool)


def _sharded(file: str, index: str) -> Change:
    """The tensors in ``file`` too, with an index."""

    def change(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: 2 * it for name, it in tensors.items()}, folder / file)
        (folder / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))

    return change


def _two_indexes(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    _sharded(WEIGHTS, INDEX)(folder, tensors)
    _sharded("half.safetensors", "model.half.safetensors.index.json")(folder, tensors)


def _meta_beside(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "consolidated.00.pth")


def _checkpoint_inside(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    CheckpointManager(folder / "checkpoint").save(3, _full(), RUN)


ODD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a tied head": (_untied(slice(0, 0)), ()),
    "a tied head that differs late": (_untied(slice(90, None)), ("tie_word_embeddings", "config.json")),
    "a tied head that differs early": (_untied(slice(0, 1)), ("tie_word_embeddings", "config.json")),
    "an untied head": (_says_so, ()),
    "a tied head alone": (_head_alone, ()),
    "buffers of integers": (_buffers, ()),
    "one file and its index": (_sharded(WEIGHTS, INDEX), ()),
    "one file and another's index": (_sharded("a.safetensors", INDEX), (WEIGHTS, INDEX)),
    "two indexes": (_two_indexes, (INDEX, "model.half.safetensors.index.json")),
    "Mistral's index beside": (_sharded(MISTRAL, f"{MISTRAL}.index.json"), ()),
    "Meta's file beside": (_meta_beside, (WEIGHTS, "consolidated.00.pth")),
    "a checkpoint inside": (_checkpoint_inside, (WEIGHTS, "checkpoint/step-3")),
}


@pytest.mark.parametrize("case", ODD)
def test_a_folder_has_the_loss_of_transformers_or_is_rejected(case: str, tmp_path: Path) -> None:
    """Within 1e-5, since both compute in fp32; what is rejected names both files and the way out."""
    from transformers import AutoModelForCausalLM

    folder, (change, named) = tmp_path / "hf", ODD[case]
    save_transformers("llama3.2", folder)
    tensors = load_file(folder / WEIGHTS)
    change(folder, tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def opened() -> LoadedModel:
        return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)

    if named:
        with pytest.raises(DataError) as error:
            opened()
        assert all(name in str(error.value) for name in (*named, "fix:"))
        return
    loaded = opened()
    assert (loaded.note.count("model.mask") == 1) == (case == "buffers of integers")
    tokens = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL)
    with torch.no_grad():
        found = loaded.model(tokens, labels=labels).item() / (labels >= 0).sum().item()
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = theirs(tokens, labels=tokens).loss.item()
    assert abs(found - expected) < 1e-5


MOE = MoEArgs(16, 4, 24, 1, "sigmoid", True, 2.5, True, 4, 2, 1, 3)


def _with_moe(folder: Path, moe: object) -> CheckpointWeights:
    return CheckpointWeights(folder, Metadata({}), {"model": asdict(small()) | {"moe": moe}})


def test_a_manifest_may_have_experts(tmp_path: Path) -> None:
    moe = json.loads(json.dumps(asdict(MOE)))
    assert _with_moe(tmp_path, moe).args == replace(small(), moe=MOE)
    needed = {key: moe[key] for key in ("num_experts", "top_k", "ffn_dim")}
    assert _with_moe(tmp_path, needed).args.moe == MoEArgs(16, 4, 24)
    assert _with_moe(tmp_path, None).args.moe is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 17}, "moe.top_k = 17: must be at most num_experts, which is 16"),
        ({"num_expert_groups": 3}, "moe.num_expert_groups = 3: must divide num_experts, which is 16"),
        ({"ffn_dim": None}, "moe.ffn_dim is missing"),
        ({"num_experts": 0}, "moe.num_experts = 0: must be a positive integer"),
        ({"first_dense": -1}, "moe.first_dense = -1: must be a nonnegative integer"),
        ({"step": 0}, "moe.step = 0: must be a positive integer"),
        ({"score_func": "tanh"}, 'moe.score_func = "tanh": must be "softmax" or "sigmoid"'),
        ({"route_norm": 1}, "moe.route_norm = 1: must be true or false"),
        ({"route_scale": 0}, "moe.route_scale = 0: must be a positive number"),
        ({"capacity": 2}, "moe.capacity = 2: is not a model field of this toolkit"),
    ],
)
def test_invalid_experts_of_a_manifest_are_reported(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        _with_moe(tmp_path, asdict(MOE) | change)
    assert says in str(caught.value)
