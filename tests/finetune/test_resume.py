"""Checkpoints of an adapter: what is trained and no more, at any layout, beside the model it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.mesh_runs import write_pairs, write_weighted
from tests.meshes import PAIR_TEMPLATE, SINCE_2_12
from tests.training import small_config, small_trainer
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.errors import CheckpointError
from toolkit.finetune.parameters import added_shapes
from toolkit.models.from_config import model_args

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {
        "adapter": "lora",
        "trainable_token_indices": [100, 32],
        "lora": {"target_modules": ["all-linear"], "use_dora": True},
    },
    "qlora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "quantize_base": "nf4"}},
    "prefix_tuning": {"adapter": "prefix_tuning"},
    "llama_adapter": {"adapter": "llama_adapter", "llama_adapter": {"adapter_layers": 1}},
    "freeze": {"freeze_first_layers": 1},
    "dpo": {"adapter": "lora", "objective": "dpo"},
    "dpo-whole": {"objective": "dpo"},
    "weighted": {"adapter": "lora"},
}
if not SINCE_2_12:
    del ADAPTERS["qlora"]
IN_CI = ("lora", "qlora", "prefix_tuning", "weighted")
NAMES = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive, id=name) for name in ADAPTERS
]
Run = Callable[[str], tuple[list[float], list[float]]]
LAYOUTS: list[dict[str, int]] = [
    {},
    {"tensor_parallel_degree": 2},
    {"pipeline_parallel_degree": 2},
    {"context_parallel_degree": 2},
]
EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}


def configure(folder: Path, name: str, *, steps: int, layout: dict[str, int], **checkpoint: Any) -> Any:
    rows: dict[str, Any] = {}
    if name.startswith("dpo"):
        rows = {"dataset_path": write_pairs(folder.parent / "pairs.jsonl", 40), "format": "preference"}
    if name == "weighted":
        rows = {"dataset_path": write_weighted(folder.parent / "rows.jsonl", 40), "format": "messages"}
    return small_config(
        folder,
        data={"chat_template": PAIR_TEMPLATE, "empty_mask": "drop"} if rows else {},
        finetune=ADAPTERS[name],
        model={"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
        training={"steps": steps, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2, **EXACT}
        | rows,
        optimizer={"lr": 1e-2},
        lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
        parallelism=layout,
        checkpoint={"enable": True, "interval": 2, **checkpoint},
    )


def losses(folder: Path, name: str, **options: Any) -> list[float]:
    trainer = small_trainer(configure(folder, name, **options))
    trainer.train()
    return [record["loss"] for record in trainer.history]


def _run(folder: str, name: str) -> tuple[list[float], list[float]]:
    whole = losses(Path(folder, name, "whole"), name, steps=2 + 2 * len(LAYOUTS), layout={})
    parts = losses(Path(folder, name, "parts"), name, steps=2, layout={})
    for index, layout in enumerate(LAYOUTS):
        steps = 4 + 2 * index
        parts += losses(Path(folder, name, "parts"), name, steps=steps, layout=layout)
    return whole, parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Run an adapter once, and return its losses without and with changes of the layout."""
    return cache(lambda name: run_world(_run, 2, str(folder), name)[0])


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_in_another_layout_as_if_it_had_never_stopped(run: Run, name: str) -> None:
    whole, parts = run(name)
    assert parts == pytest.approx(whole, rel=1e-12)
    assert len({round(loss, 6) for loss in whole}) == len(whole)


@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] not in ("freeze", "dpo-whole")])
def test_a_checkpoint_has_all_of_the_adapter_and_nothing_else(folder: Path, run: Run, name: str) -> None:
    run(name)
    config = configure(folder / name / "parts", name, steps=2, layout={})
    args = model_args(config, tokenizer_vocab=2048)
    for step in (2, 4, 6, 8, 10):  # fsdp, fsdp, tp, pp, cp
        _, metadata = open_checkpoint(folder / name / "parts/checkpoint" / f"step-{step}", verify=True)
        there = {
            key.removeprefix("model."): tuple(entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith("model.")
        }
        assert there == added_shapes(args, config.finetune)


@pytest.mark.skipif(not SINCE_2_12, reason="torch 2.11 shards no NF4")
def test_an_adapter_does_not_go_on_with_another_model(folder: Path, run: Run) -> None:
    run("lora")
    parts = folder / "lora/parts"
    base = read_manifest(parts / "checkpoint/step-10")["run"]["base"]
    assert base["place"] == "seed 0" and len(base["fingerprint"]) == 64
    config = configure(parts, "lora", steps=12, layout={})
    other = config.model_copy(update={"debug": config.debug.model_copy(update={"seed": 1})})
    assert "other weights: those of seed 0" in run_world(_refusal, 1, other)[0]


@pytest.mark.skipif(not SINCE_2_12, reason="torch 2.11 shards no NF4")
def test_an_adapter_does_not_go_on_with_another_precision_of_its_model(folder: Path, run: Run) -> None:
    run("qlora")
    config = configure(folder / "qlora/parts", "qlora", steps=12, layout={})
    lora = config.finetune.lora.model_copy(update={"quantize_base": "none"})
    other = config.model_copy(update={"finetune": config.finetune.model_copy(update={"lora": lora})})
    assert 'with finetune.lora.quantize_base = "nf4"' in run_world(_refusal, 1, other)[0]


def _refusal(config: Any) -> str:
    with pytest.raises(CheckpointError) as raised:
        small_trainer(config)
    return str(raised.value)
