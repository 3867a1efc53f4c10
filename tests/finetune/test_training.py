"""Fine-tuning beside other options: what is computed again, dropped, and updated in backward."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.mesh_runs import write_documents, write_pairs
from tests.meshes import PAIR_TEMPLATE, SINCE_2_12
from tests.training import small_config, small_trainer, weights_digest

LORA = {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "dropout": 0.2}}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "dropout": 0.2, "use_dora": True}},
    "qlora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "quantize_base": "nf4"}},
    "prefix_tuning": {"adapter": "prefix_tuning"},
    "llama_adapter": {"adapter": "llama_adapter", "llama_adapter": {"adapter_layers": 2}},
    "freeze": {"freeze_first_layers": 1},
    "classification": {"adapter": "lora", "classification": {"num_labels": 2, "hidden_sizes": [8]}},
    "dpo": {"adapter": "lora", "objective": "dpo", "lora": {"target_modules": ["all-linear"]}},
}
if not SINCE_2_12:
    del ADAPTERS["qlora"]
EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "each": {"mode": "selective", "selective_ac_option": "1"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
}


def curve(folder: Path, finetune: dict[str, Any], mode: str = "none", **tables: Any) -> dict[str, Any]:
    """The losses and gradient norms of a run, and a digest of the weights after it."""
    data = _data(folder.parent.parent, finetune)
    config = small_config(
        folder,
        finetune=finetune,
        data={"chat_template": PAIR_TEMPLATE} if "format" in data else {},
        model={"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
        training={
            "steps": 3, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 4, **EXACT
        } | data | tables.pop("training", {}),
        optimizer={"lr": 1e-2} | tables.pop("optimizer", {}),
        lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
        activation_checkpoint=MODES[mode],
        **tables,
    )  # fmt: skip
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    steps = [record for record in trainer.history if "loss" in record]
    found = {key: [record[key] for record in steps] for key in ("loss", "grad_norm")}
    return found | {"weights": weights_digest(trainer.model_parts.models[0])}


def _data(folder: Path, finetune: dict[str, Any]) -> dict[str, str]:
    """The corpus of a run: texts where it asks for nothing else."""
    if finetune.get("objective") == "dpo":
        return {"dataset_path": write_pairs(folder / "pairs.jsonl", 40), "format": "preference"}
    if "classification" in finetune:
        return {"dataset_path": write_documents(folder / "labeled.jsonl", 40)}
    return {}


def _run_all(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = {
        (name, mode): curve(Path(folder, name, mode), options, mode)
        for name, options in ADAPTERS.items()
        for mode in MODES
    }
    plain = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
    early = {"training": {"max_norm": float("inf")}}
    found["lora", "updated after backward"] = curve(Path(folder, "lora", "after"), plain, **early)
    early["optimizer"] = {"early_step_in_backward": True}
    found["lora", "updated in backward"] = curve(Path(folder, "lora", "in"), plain, **early)
    found["lora", "without dropout"] = curve(Path(folder, "lora", "plain"), plain)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    return run_world(_run_all, 1, str(tmp_path_factory.mktemp("finetuned")), timeout=300)[0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_computed_again_is_the_same(found: dict, name: str, mode: str) -> None:
    """To the last bit; the same values are dropped, too. PEFT's prefixes fail here, since they are a cache
    of past keys."""
    assert found[name, mode] == found[name, "none"]
    assert len(set(found[name, "none"]["loss"])) == 3  # something is learnt


def test_dropout_is_on_in_training(found: dict) -> None:
    dropped, plain = found["lora", "none"]["loss"], found["lora", "without dropout"]["loss"]
    assert dropped[0] == pytest.approx(plain[0])  # B is 0 at first
    assert dropped[2] != pytest.approx(plain[2], rel=1e-9)


def test_an_adapter_can_be_updated_in_backward(found: dict) -> None:
    expected = found["lora", "updated after backward"]["loss"]
    assert found["lora", "updated in backward"]["loss"] == pytest.approx(expected, rel=1e-12)
