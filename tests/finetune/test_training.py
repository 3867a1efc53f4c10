"""Fine-tuning beside other options: what is computed again, dropped, and updated in backward."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.training import small_config, small_trainer

LORA = {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "dropout": 0.2}}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "dropout": 0.2, "use_dora": True}},
    "prefix_tuning": {"adapter": "prefix_tuning"},
    "llama_adapter": {"adapter": "llama_adapter", "llama_adapter": {"adapter_layers": 2}},
    "freeze": {"freeze_first_layers": 1},
}
EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "each": {"mode": "selective", "selective_ac_option": "1"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
}


def losses(folder: Path, finetune: dict[str, Any], mode: str = "none", **tables: Any) -> list[float]:
    config = small_config(
        folder,
        finetune=finetune,
        model={"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48},
        training={
            "steps": 3, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 4, **EXACT
        } | tables.pop("training", {}),
        optimizer={"lr": 1e-2, "implementation": "foreach"} | tables.pop("optimizer", {}),
        lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
        activation_checkpoint=MODES[mode],
        **tables,
    )  # fmt: skip
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [record["loss"] for record in trainer.history]


def _run_all(folder: str) -> dict[tuple[str, str], list[float]]:
    found = {
        (name, mode): losses(Path(folder, name, mode), options, mode)
        for name, options in ADAPTERS.items()
        for mode in MODES
    }
    plain = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
    early = {"training": {"max_norm": float("inf")}}
    found["lora", "updated after backward"] = losses(Path(folder, "after"), plain, **early)
    early["optimizer"] = {"early_step_in_backward": True}
    found["lora", "updated in backward"] = losses(Path(folder, "in"), plain, **early)
    found["lora", "without dropout"] = losses(Path(folder, "plain"), plain)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[float]]:
    return run_world(_run_all, 1, str(tmp_path_factory.mktemp("finetuned")), timeout=300)[0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_computed_again_is_the_same(found: dict, name: str, mode: str) -> None:
    """The same values are dropped, too. PEFT's prefixes fail here, since they are a cache of past keys."""
    assert found[name, mode] == pytest.approx(found[name, "none"], rel=1e-12)


def test_dropout_is_on_in_training(found: dict) -> None:
    assert found["lora", "none"][0] == pytest.approx(found["lora", "without dropout"][0])  # B is 0 at first
    assert found["lora", "none"][2] != pytest.approx(found["lora", "without dropout"][2], rel=1e-9)


def test_an_adapter_can_be_updated_in_backward(found: dict) -> None:
    expected = found["lora", "updated after backward"]
    assert found["lora", "updated in backward"] == pytest.approx(expected, rel=1e-12)
