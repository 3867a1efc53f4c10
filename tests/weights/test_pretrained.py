"""Training goes on from a trained model: its loss starts where transformers says that it is."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from tests.weights.stories import ASSETS, needs_assets
from toolkit.config import Config
from toolkit.trainer import Trainer
from toolkit.weights.safetensors import SafetensorsFolder

pytestmark = needs_assets
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallelism": {}},
    "tp": {"parallelism": {"tensor_parallel_degree": 2}},
    "pp": {"parallelism": {"pipeline_parallel_degree": 2}},
    "broadcast": {"checkpoint": {"initial_load_broadcast": True}},
    "offload": {"training": {"enable_cpu_offload": True}},
}


def _config(folder: Path, *, steps: int = 3, **tables: dict[str, Any]) -> Config:
    """stories260K on the stories it was trained on, its shape from its config.json."""
    training = {
        "dataset_path": str(ASSETS / "text/tinystories_2M.txt"),
        "seq_len": 128,
        "global_batch_size": 8,
        "local_batch_size": 4,
        "steps": steps,
    }
    shape = dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"))  # none of small_config's
    return small_config(
        folder,
        model=shape | {"hf_assets_path": str(ASSETS / "stories260K/hf")},
        data={"document_mask": False},
        training=training | tables.get("training", {}),
        optimizer={"lr": 1e-4},
        checkpoint={"enable": True, "initial_load_in_hf": True} | tables.pop("checkpoint", {}),
        parallelism=tables.get("parallelism", {}),
    )


def _losses(trainer: Trainer) -> dict[int, float]:
    trainer.train()
    return {record["step"]: record["loss"] for record in trainer.history}


def _runs(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tables in LAYOUTS.items():
        found[name] = _losses(small_trainer(_config(Path(folder, name), **tables)))
    found["again"] = _losses(small_trainer(_config(Path(folder, "tp"), steps=4, **LAYOUTS["tp"])))
    # of tp both ranks read the whole batch
    trainer = small_trainer(_config(Path(folder, "look"), **LAYOUTS["tp"]))
    found["batches"] = list(islice(iter(trainer.loader), trainer.batch.accumulation))
    export = _config(Path(folder, "export"), checkpoint={"last_save_in_hf": True}, steps=2)
    trainer = small_trainer(export)
    _losses(trainer)
    # as a kill between the last save and the export leaves it
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(folder, "export/hf"))
    dist.barrier()
    assert _losses(small_trainer(export)) == {}
    exported = SafetensorsFolder(Path(folder, "export/hf/step-2"))
    found["not exported"] = [
        name
        for name, parameter in trainer.model_parts.named_parameters()
        if not torch.equal(_whole(parameter), exported.read(name))
    ]
    step = {"initial_load_path": str(Path(folder, "export/checkpoint/step-2"))}
    found["from the step"] = _losses(small_trainer(_config(Path(folder, "on"), checkpoint=step, steps=1)))
    often = {"interval": 1, "hf_export_interval": 2, "export_dtype": "bfloat16"}
    trainer = small_trainer(_config(Path(folder, "often"), checkpoint=often, steps=5))
    trainer.train()
    found["exports"] = {
        step.name: {str(stored.dtype) for stored in SafetensorsFolder(step).tensors.values()}
        for step in Path(folder, "often/hf").iterdir()
    }
    return found


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _loss_of_transformers(folder: Path, batches: list[dict[str, torch.Tensor]]) -> float:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = count = 0.0
    for batch in batches:
        with torch.no_grad():
            logits = model(batch["tokens"]).logits
        total += F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
        count += (batch["labels"] != -100).sum().item()
    return total / count


def test_the_loss_starts_where_transformers_says_on_every_layout(tmp_path: Path) -> None:
    first, second = run_world(_runs, 2, str(tmp_path))
    expected = _loss_of_transformers(ASSETS / "stories260K/hf", first["batches"])
    assert expected < 2.5  # not that of chance, which is ln 512
    for name in LAYOUTS:
        assert first[name][1] == pytest.approx(expected, abs=2e-5), name
        assert first[name] == pytest.approx(first["fsdp"], abs=1e-4), name
    assert first["again"].keys() == {4}  # from the run's own checkpoint, not from the start
    assert first["not exported"] == second["not exported"] == []
    assert first["exports"] == {"step-2": {"torch.bfloat16"}, "step-4": {"torch.bfloat16"}}
    # two small steps later, on the batch of the first of them
    exported = _loss_of_transformers(tmp_path / "export/hf/step-2", first["batches"])
    assert expected - 0.1 < exported < expected
    assert first["from the step"][1] == pytest.approx(exported, abs=2e-5)
