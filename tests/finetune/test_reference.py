"""The stored reference of a run: as that of an adapter's model, kept on disk, and the same after a resume."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_world
from tests.mesh_runs import write_labeled, write_pairs
from tests.meshes import PAIR_TEMPLATE
from tests.training import small_config, small_trainer
from toolkit.config.finetune import Finetune
from toolkit.errors import CheckpointError

EXACT = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
LORA = {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}}
FORMATS = {"dpo": ("preference", write_pairs), "kto": ("unpaired_preference", write_labeled)}


def _config(
    folder: Path,
    finetune: dict[str, Any],
    *,
    steps: int = 4,
    seed: int = 0,
    samples: int = -1,
) -> Any:
    form, write = FORMATS[finetune["objective"]]
    rows = {"dataset_path": write(folder.parent / f"{form}.jsonl", 40)}
    return small_config(
        folder,
        data={"format": form, "chat_template": PAIR_TEMPLATE, "empty_mask": "drop"},
        finetune=finetune,
        debug={"seed": seed},
        model={"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64},
        training={"steps": steps, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2, **EXACT}
        | rows,
        validation={
            "enable": True,
            "freq": 2,
            "seq_len": 24,
            "local_batch_size": 2,
            "samples": samples,
            **rows,
        },
        optimizer={"lr": 1e-2},
        lr_scheduler={"warmup_steps": 0, "decay_type": "constant"},
        checkpoint={"enable": True, "interval": 2},
    )


def _run(config: Any) -> list[dict[str, Any]]:
    """Return the logged losses and rewards, step by step."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = small_trainer(config)
        trainer.train()
    return [
        {name: value for name, value in record.items() if "loss" in name or "rewards" in name or "kl" in name}
        for record in trainer.history
    ]


def _both(folder: str, objective: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    options = LORA | {"objective": objective}
    again = _run(_config(Path(folder, objective, "in_steps"), options))
    Finetune.stores_reference = property(lambda self: True)  # type: ignore[method-assign,assignment]
    _run(_config(Path(folder, objective, "few"), options, steps=1, samples=1))  # files have all rows
    return _run(_config(Path(folder, objective, "stored"), options)), again


@pytest.mark.parametrize("objective", FORMATS)
def test_it_is_that_of_a_model_without_its_adapter(tmp_path: Path, objective: str) -> None:
    """An adapter's model computes its reference in each step, too."""
    stored, again = run_world(_both, 1, str(tmp_path), objective)[0]
    assert len(stored) == len(again) == 6
    for mine, theirs in zip(stored, again, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10, abs=1e-12)
    assert abs(stored[-1]["validation_rewards/margins"]) > 1e-4


def _resumed(folder: str, lose: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    options = {"objective": "kto"}
    whole = _run(_config(Path(folder, "whole"), options))
    files = [str(file) for file in Path(folder, "cache/references").iterdir()]
    parts = _run(_config(Path(folder, "parts"), options, steps=2))
    if lose:
        shutil.rmtree(Path(folder, "cache/references"))
    return whole, parts + _run(_config(Path(folder, "parts"), options)), files


@pytest.mark.parametrize("lose", [False, True], ids=["kept", "lost"])
def test_a_run_goes_on_with_the_reference_of_its_start(tmp_path: Path, lose: bool) -> None:
    """To the last bit, even if the initial model must give it again."""
    whole, parts, files = run_world(_resumed, 1, str(tmp_path), lose)[0]
    assert len(files) == 2, "of training and validation"
    assert parts == whole


def _damaged(folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    options = {"objective": "dpo"}
    first = _run(_config(Path(folder, "first"), options, steps=2))
    for file in Path(folder, "cache/references").iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = _run(_config(Path(folder, "again"), options, steps=2))
    with pytest.raises(CheckpointError, match="another reference: it started from other"):
        _run(_config(Path(folder, "first"), options, seed=1))
    return first, again


def test_a_damaged_file_is_made_again_and_other_weights_are_rejected(tmp_path: Path) -> None:
    first, again = run_world(_damaged, 1, str(tmp_path))[0]
    assert first == again
    assert first[0]["loss"] == pytest.approx(math.log(2), rel=1e-12)


def _from_adapter(folder: str) -> list[dict[str, Any]]:
    options = LORA | {"objective": "dpo"}
    _run(_config(Path(folder, "first"), options))
    more = options | {"adapter_path": f"{folder}/first/checkpoint/step-4", "trainable": ["norm.weight"]}
    return _run(_config(Path(folder, "second"), more))


def test_an_adapter_that_is_trained_on_starts_from_its_own_reference(tmp_path: Path) -> None:
    losses = [record["loss"] for record in run_world(_from_adapter, 1, str(tmp_path))[0] if "loss" in record]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-9)
    assert losses[-1] != pytest.approx(math.log(2), rel=1e-3)
