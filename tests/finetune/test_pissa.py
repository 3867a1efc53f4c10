"""PiSSA's start beside PEFT's, its training, and the LoRA of the original model that comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.finetune.adapters import adapted, check_close, logits
from tests.finetune.test_combine import read_base
from tests.models.families import read, save_transformers
from toolkit.cli import run_command
from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_FINISHED
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapter_on
from toolkit.weights.open import open_weights

peft = pytest.importorskip("peft")

RANK = 5


def divide(folder: Path, *flags: str) -> int:
    places = [str(folder / name) for name in ("base", "initial", "residual")]
    return run_command("convert", ["pissa", *places, *flags])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_it_starts_where_the_model_is(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = logits(save_transformers(tmp_path / "base", family))
    tokens = {"bos_token_id": 3, "eos_token_id": [5, 7]}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(tokens))
    assert divide(tmp_path, f"--rank={RANK}") == EXIT_FINISHED
    said = capsys.readouterr().out
    assert f"--finetune.adapter_path={tmp_path / 'initial'} --finetune.lora.rank={RANK}" in said
    assert (
        json.loads((tmp_path / "residual" / "generation_config.json").read_text()).items() >= tokens.items()
    )
    initial = open_adapter_on(tmp_path / "initial", open_weights(tmp_path / "residual"))
    check_close(logits(adapted(initial, lambda model: read(tmp_path / "residual"))), base)
    residual = logits(read(tmp_path / "residual"))
    assert (base - residual).abs().max() > 0.05 * base.abs().max()
    # What is left of a matrix has none of its largest singular values.
    name = "layers.0.attention.wo.weight"
    before, after = (
        torch.linalg.svdvals(open_weights(tmp_path / it).read(name).double()) for it in ("base", "residual")
    )
    torch.testing.assert_close(after[:-RANK], before[RANK:], rtol=1e-5, atol=1e-6)


def test_its_update_is_the_one_of_peft(tmp_path: Path) -> None:
    model = save_transformers(tmp_path / "base", "qwen3")
    assert divide(tmp_path, f"--rank={RANK}", "--target-modules=q_proj,w2") == EXIT_FINISHED
    ours = peft.PeftModel.from_pretrained(model, str(tmp_path / "initial")).state_dict()
    options = peft.LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=["q_proj", "down_proj"], init_lora_weights="pissa"
    )
    theirs = peft.get_peft_model(read_base(tmp_path), options).state_dict()
    names = [name for name in theirs if "lora_A" in name]
    assert len(names) == 2 * model.config.num_hidden_layers
    for name in names:
        other = name.replace("lora_A", "lora_B")
        # In fp32, vectors of random weights are uncertain by 1e-7 over the distance of two singular values.
        update = theirs[other] @ theirs[name]
        torch.testing.assert_close(
            ours[other] @ ours[name], update, rtol=0, atol=2e-3 * float(update.abs().max())
        )


def test_a_trained_one_becomes_a_lora_of_the_model(tmp_path: Path) -> None:
    save_transformers(tmp_path / "base", "qwen3")
    assert divide(tmp_path, f"--rank={RANK}") == EXIT_FINISHED
    base, residual = (open_weights(tmp_path / it) for it in ("base", "residual"))
    # An adapter of the residual in which something was learned: twice the initial one.
    parts = [f"{tmp_path / 'initial'}=2"]
    asked = ["combine", str(tmp_path / "residual"), str(tmp_path / "trained"), *parts]
    assert run_command("checkpoint", asked) == EXIT_FINISHED
    trained = Merged(residual, open_adapter_on(tmp_path / "trained", residual))
    asked = ["combine", str(tmp_path / "base"), str(tmp_path / "lora"), str(tmp_path / "trained")]
    asked += [f"{tmp_path / 'initial'}=-1", "--trained-on", str(tmp_path / "residual")]
    assert run_command("checkpoint", asked) == EXIT_FINISHED
    lora = open_adapter_on(tmp_path / "lora", base)
    assert lora.options.lora.rank == 2 * RANK
    for name in trained.tensors:
        torch.testing.assert_close(Merged(base, lora).read(name), trained.read(name), rtol=1e-4, atol=1e-5)


def test_what_it_cannot_divide_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_transformers(tmp_path / "base", "qwen3")
    assert divide(tmp_path, "--rank=999") == EXIT_DATA and "its rank is below 999" in capsys.readouterr().err
    assert divide(tmp_path, "--target-modules=wx") == EXIT_DATA
    assert "has no linear layers named wx" in capsys.readouterr().err
    assert not any((tmp_path / it).exists() for it in ("initial", "residual"))
    with pytest.raises(SystemExit):
        divide(tmp_path, "--vocab-size=200")
    with pytest.raises(SystemExit) as stopped:
        run_command(
            "convert", ["merge", *map(str, [tmp_path / "base", tmp_path, tmp_path / "out"]), "--rank=4"]
        )
    assert stopped.value.code == EXIT_CONFIG
