"""Sums of adapters, beside PEFT's and beside merging one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.adapters import adapted, adapter_of, check_close, logits
from tests.models.families import read, save_transformers
from toolkit.cli import run_command
from toolkit.config.finetune import Finetune
from toolkit.distributed.agreement import Ranks
from toolkit.errors import EXIT_DATA, EXIT_FINISHED
from toolkit.finetune.open_adapter import open_adapter
from toolkit.finetune.peft_folder import write_peft
from toolkit.weights.safetensors import SafetensorsFolder

peft = pytest.importorskip("peft")

OURS: dict[str, dict[str, Any]] = {
    "one": {"rank": 3, "alpha": 12, "target_modules": ["wq", "w2"]},
    "two": {"rank": 5, "alpha": 4, "use_rslora": True, "target_modules": ["wq", "wo", "w1"]},
}


def _write(folder: Path, name: str, **lora: Any) -> Path:
    options = Finetune.model_validate({"adapter": "lora", "lora": lora})
    adapter = adapter_of(options, SafetensorsFolder(folder / "base").args, folder / "step")
    write_peft(adapter, folder / name, dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    return folder / name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "llama4"])
def test_a_sum_is_the_one_of_peft(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_transformers(tmp_path / "base", family)
    paths = {name: _write(tmp_path, name, **lora) for name, lora in OURS.items()}
    weights = [f"{paths['one']}=0.5", f"{paths['two']}=-0.25"]
    assert (
        run_command("checkpoint", ["combine", str(tmp_path / "base"), str(tmp_path / "sum"), *weights])
        == EXIT_FINISHED
    )
    assert "a LoRA of rank 8, the sum of 2 adapters" in capsys.readouterr().out
    written = json.loads((tmp_path / "sum/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    found = open_adapter(tmp_path / "sum", SafetensorsFolder(tmp_path / "base").args)
    ours = logits(adapted(found, lambda model: read(tmp_path / "base")))
    plain = logits(base)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "sum"))
    check_close(logits(theirs), ours)
    assert (plain - ours).abs().max() > 0.05 * ours.abs().max()
    if family == "qwen3":  # PEFT cannot combine updates of parameters
        theirs = peft.PeftModel.from_pretrained(read_base(tmp_path), str(paths["one"]), adapter_name="one")
        theirs.load_adapter(str(paths["two"]), adapter_name="two")
        theirs.add_weighted_adapter(["one", "two"], [0.5, -0.25], "sum", combination_type="cat")
        theirs.set_adapter("sum")
        check_close(logits(theirs), ours)


def read_base(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", attn_implementation="eager"
    ).eval()


def test_what_is_no_plain_lora_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_transformers(tmp_path / "base", "qwen3")
    plain = _write(tmp_path, "plain", **OURS["one"])
    dora = _write(tmp_path, "dora", rank=2, use_dora=True)
    said = run_command(
        "checkpoint", ["combine", str(tmp_path / "base"), str(tmp_path / "sum"), str(plain), str(dora)]
    )
    assert said == EXIT_DATA and "magnitudes (DoRA)" in capsys.readouterr().err
    assert not (tmp_path / "sum").exists()
    with pytest.raises(SystemExit):
        run_command("checkpoint", ["combine", str(tmp_path / "base"), str(tmp_path / "sum"), f"{plain}=half"])
    assert "the weight half is not a finite number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_command("checkpoint", ["combine", str(tmp_path / "base"), str(tmp_path / "sum"), f"{plain}=nan"])
