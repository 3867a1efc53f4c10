"""A model in a checkpoint of any layout is handed on by the ranks of its run, and taken up again by any."""

from __future__ import annotations

import hashlib
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.training import small_config
from toolkit.build import build_model
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpointer import Checkpointer
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError
from toolkit.exporter import Exporter
from toolkit.models.from_config import model_args
from toolkit.parallel.dims import degrees
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.train_step import TrainState
from toolkit.weights.convert import convert, prepare
from toolkit.weights.export import export_hf

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_degree": 2},
    "pp2": {"pipeline_parallel_degree": 2},
    "fsdp2 tp2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "pp2 tp2": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    "hsdp2x2": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    "fsdp2 pp2 tp2": {
        "data_parallel_shard_degree": 2, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2
    },
}  # fmt: skip
SIZES = {"one": 1, "tp2": 2, "pp2": 2, "fsdp2 tp2": 4, "pp2 tp2": 4, "hsdp2x2": 4, "fsdp2 pp2 tp2": 8}


def _model(folder: Path, layout: str, *, tied: bool, seed: int) -> tuple[ModelParts, dict[str, Any]]:
    """A model whose weights depend on ``seed`` alone, and what its manifest tells."""
    config = small_config(
        folder / "run",
        parallelism=LAYOUTS[layout],
        model={"vocab_size": 98, "tie_embeddings": tied},
        checkpoint={"enable": True},
    )
    shape = degrees(config.parallelism, dist.get_world_size())
    assert shape is not None
    mesh, args = build_mesh(torch.device("cpu"), **asdict(shape)), model_args(config, tokenizer_vocab=None)
    model_parts = build_model(config, args, mesh, torch.device("cpu"), param_dtype=torch.float32, seed=seed)
    return model_parts, {"model": asdict(args)}


def _tensors(model_parts: ModelParts) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in model_parts.named_parameters()}


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _through(base: str, layouts: list[str], tied: bool) -> dict[str, dict[str, tuple[str, str]]]:
    """For each layout and format: what it hands on, and what it does after it has loaded that."""
    found, folder = {}, Path(base)
    for layout in layouts:
        at = folder / layout.replace(" ", "_") / ("tied" if tied else "untied")
        model_parts, run = _model(at, layout, tied=tied, seed=1)
        first = _handed_on(CheckpointManager(at).save(1, _tensors(model_parts), run), at / "first")
        again = {}
        for number, form in enumerate(first):
            if Ranks().rank == 0:
                convert(prepare(f"{form}-to-dcp", at / "first" / form, at / "dcp" / form))
            dist.barrier()
            other, _ = _model(at, layout, tied=tied, seed=2)
            CheckpointManager(at / "dcp" / form).load(0, _tensors(other))
            step = CheckpointManager(at).save(2 + number, _tensors(other), run)
            again[form] = _handed_on(step, at / f"from {form}")[form]
        found[layout] = {form: (first[form], again[form]) for form in first}
    return found


def _handed_on(step: Path, folder: Path) -> dict[str, str]:
    """Digests of a checkpoint's weights, as Hugging Face's files by all ranks and as Meta's by one."""
    ranks = Ranks()
    export_hf(step, folder / "hf", dtype=torch.float32, tokenizer_path=None, ranks=ranks, max_bytes=100_000)
    if ranks.rank == 0:
        convert(prepare("dcp-to-meta", step, folder / "meta"))
    dist.barrier()
    return {form: _digest(folder / form) for form in ("hf", "meta")}


def _exports(folder: Path, layouts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for tied in (False, True):
        for size in sorted({SIZES[layout] for layout in layouts}):
            mine = [layout for layout in layouts if SIZES[layout] == size]
            for of_rank in run_world(_through, size, str(folder), mine, tied, timeout=170):
                for layout, forms in of_rank.items():
                    for form, (first, again) in forms.items():
                        assert first == again, f"{layout} hands on other weights than those it has loaded"
                        found[f"{layout} {form} {tied}"] = first
    return found


def _check_alike(found: dict[str, str]) -> None:
    for kind in ("hf False", "hf True", "meta False", "meta True"):
        digests = {layout: digest for layout, digest in found.items() if layout.endswith(kind)}
        assert len(set(digests.values())) == 1, digests


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("exports")
    return folder, _exports(folder, ["one", "pp2 tp2"])


def test_a_pipeline_with_tensor_parallelism_hands_on_what_one_rank_does(
    exported: tuple[Path, dict[str, str]],
) -> None:
    _check_alike(exported[1])


def test_what_is_handed_on_is_the_model_in_files_with_an_index(exported: tuple[Path, dict[str, str]]) -> None:
    from transformers import AutoModelForCausalLM

    folder = exported[0] / "pp2_tp2" / "untied" / "first" / "hf"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    [ours] = run_world(_logits, 1, str(exported[0]), timeout=60)
    tokens = torch.arange(40)[None] % 98
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, torch.from_numpy(ours), rtol=0, atol=1e-5)


def _logits(base: str) -> np.ndarray:
    model_parts, _ = _model(Path(base) / "logits", "one", tied=False, seed=1)
    with torch.no_grad():
        return model_parts.models[0](torch.arange(40)[None] % 98).numpy()


@pytest.mark.exhaustive
def test_every_layout_hands_on_the_same_files(tmp_path: Path) -> None:
    _check_alike(_exports(tmp_path, list(LAYOUTS)))


def _unwritable(base: str) -> list[str]:
    folder, said = Path(base), []
    model_parts, run = _model(folder, "tp2", tied=False, seed=1)
    step = CheckpointManager(folder).save(1, _tensors(model_parts), run)
    (folder / "file").touch()
    for out, tokenizer in ((folder / "file" / "hf", None), (folder / "hf", folder / "none")):
        with pytest.raises(Exception) as error:
            export_hf(step, out, dtype=torch.bfloat16, tokenizer_path=tokenizer, ranks=Ranks())
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_what_cannot_be_handed_on_fails_alike_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_world(_unwritable, 2, str(tmp_path), timeout=60)
    assert first == second
    assert first[0].startswith(CheckpointError.__name__) and "cannot be written" in first[0]
    assert first[1].startswith("DataError") and "does not exist" in first[1]


def test_the_next_start_exports_a_step_that_was_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes back and is killed between a save and its export has the folder of the step before."""
    written = []

    def write(self: Exporter, step: int, out: Path) -> str:
        out.mkdir(parents=True, exist_ok=True)
        written.append(step)
        return "a model"

    monkeypatch.setattr(Exporter, "_write", write)
    config = small_config(tmp_path, checkpoint={"enable": True, "last_save_in_hf": True})
    manager = CheckpointManager(tmp_path / "checkpoint")
    manager.save(1, {"model.weight": torch.ones(2)}, {})
    exporter = Exporter(config, tmp_path / "hf", manager, say=print)
    exporter.export(1, final=True)
    exporter.export_missed(1, last=True)
    assert written == [1]
    os.utime(tmp_path / "hf" / "step-1", (0, 0))  # before the save
    exporter.export_missed(1, last=True)
    assert written == [1, 1]


def test_a_step_that_could_not_be_saved_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a rewind the checkpoint of the same step is another model's."""
    exported: list[int] = []
    monkeypatch.setattr(Exporter, "export", lambda self, step, *, final: exported.append(step))
    parameter = torch.nn.Parameter(torch.ones(2))
    config = small_config(tmp_path, checkpoint={"enable": True, "interval": 1, "hf_export_interval": 1})

    def save() -> None:
        parts: Any = SimpleNamespace(
            named_parameters=lambda: [("weight", parameter)], named_buffers=lambda: []
        )
        position: Any = SimpleNamespace(state_dict=dict)
        optimizer, state = torch.optim.AdamW([parameter]), TrainState(step=1)
        Checkpointer(
            config, tmp_path, model_parts=parts, optimizer=optimizer, position=position, state=state,
            metadata={}, group=None,  # type: ignore[arg-type]
        ).after_step(lambda name: nullcontext(), last=False, stop=False)  # fmt: skip

    def fail(*_: Any) -> None:
        raise CheckpointError("the disk is full")

    save()
    assert exported == [1]
    monkeypatch.setattr(CheckpointManager, "_write", fail)
    save()
    assert exported == [1]
    assert "NOT EXPORTED: step 1 was not saved" in capsys.readouterr().out
