"""The moving average of weights: torch's, in validation, in checkpoints and in exports."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.helpers import run_world
from tests.mesh_runs import configure
from tests.training import small_config, small_trainer
from toolkit.cli import run_command
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.optim.ema import weight_average
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors

DECAY = 0.75


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    options = Optimizer(ema_decay=DECAY, lr=0.1, implementation="for-loop")
    return build_optimizer(model.named_parameters(), Config(optimizer=options))


def test_it_is_torch_s() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    theirs.update_parameters(model)
    optimizer = _optimizer(model)
    average = weight_average(optimizer)
    assert average
    for _ in range(4):
        model(torch.randn(2, 5, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        average.update()
        theirs.update_parameters(model)
    expected = dict(theirs.module.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(average.averages[parameter], expected[name].detach())
    assert not torch.equal(expected["weight"], model.weight)


def test_what_is_frozen_has_none_and_weights_come_back_bit_for_bit() -> None:
    model = nn.Linear(5, 3).bfloat16()
    model.bias.requires_grad_(False)
    optimizer = _optimizer(model)
    average = weight_average(optimizer)
    assert average
    tensors = optimizer_tensors(model.named_parameters(), optimizer)
    assert [name for name in tensors if name.startswith("ema.")] == ["ema.weight"]
    assert tensors["ema.weight"].dtype == torch.float32
    weight = model.weight.detach().clone()
    model.weight.data.add_(1)
    average.update()
    # The step is smaller than what bfloat16 could hold of it.
    torch.testing.assert_close(tensors["ema.weight"], weight.float().lerp(model.weight.float(), 1 - DECAY))
    before, kept = model.weight.detach().clone(), tensors["ema.weight"].clone()
    with pytest.raises(KeyboardInterrupt), average.applied():
        assert torch.equal(model.weight, kept.bfloat16())
        raise KeyboardInterrupt
    assert torch.equal(model.weight, before) and torch.equal(tensors["ema.weight"], kept)


def _train(folder: str, tables: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    config = small_config(
        folder,
        training={"steps": steps, "global_batch_size": 4, "local_batch_size": 1},
        optimizer={"ema_decay": DECAY, "lr": 1e-2},
        checkpoint={"enable": True, "interval": 2},
        lr_scheduler={"warmup_steps": 1, "decay_type": "constant"},
        **tables,
    )
    trainer = small_trainer(config)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer.history


def _convert(*arguments: str) -> int:
    return run_command("convert", [*arguments, "--verify"])


def _text(capsys: pytest.CaptureFixture[str], *asked: str) -> str:
    sampling = ("--prompt", "Once upon", "--temperature", "1", "--max-new-tokens", "20", "--dtype", "float32")
    assert run_command("generate", [*asked, *sampling]) == 0
    return capsys.readouterr().out


def test_validation_reports_the_loss_of_what_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The average of two ranks, resumed by one, exported, and validated as the weights of a run."""
    validation = {"validation": {"enable": True, "dataset": "embedded_validation", "seq_len": 32, "freq": 2,
                                 "samples": 8, "local_batch_size": 1}}  # fmt: skip
    run_world(_train, 2, str(tmp_path / "run"), validation, 2, timeout=100)
    [history] = run_world(_train, 1, str(tmp_path / "run"), validation, 4, timeout=100)
    values = {key: value for record in history if record["step"] == 4 for key, value in record.items()}
    assert abs(values["validation_ema_loss"] - values["validation_loss"]) > 1e-3
    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    exported = {}
    for name, flags in {"ema": ["--ema"], "plain": []}.items():
        assert _convert("dcp-to-hf", step, str(tmp_path / name), *flags) == 0
        exported[name] = load_file(tmp_path / name / "model.safetensors")
    assert exported["ema"].keys() == exported["plain"].keys()
    assert all(not torch.equal(it, exported["plain"][name]) for name, it in exported["ema"].items())
    capsys.readouterr()
    texts = [_text(capsys, *asked) for asked in ((step, "--ema"), (str(tmp_path / "ema"),), (step,))]
    assert texts[0] == texts[1] != texts[2]
    assert run_command("generate", [str(tmp_path / "ema"), "--ema", "--prompt", "a"]) == 3
    assert "only these have an EMA" in capsys.readouterr().err
    [found] = run_world(_validation_of, 1, str(tmp_path), validation, timeout=100)
    assert found == pytest.approx(values["validation_ema_loss"], rel=1e-5)


def _validation_of(folder: str, tables: dict[str, Any]) -> float:
    """Validate the exported average before a first step."""
    assert _convert("hf-to-dcp", f"{folder}/ema", f"{folder}/again") == 0
    checkpoint = {"enable": True, "initial_load_path": f"{folder}/again/step-0"}
    training = {"steps": 1, "global_batch_size": 4, "local_batch_size": 1}
    trainer = small_trainer(
        small_config(f"{folder}/other", training=training, checkpoint=checkpoint, **tables)
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return next(it["validation_loss"] for it in trainer.history if it["step"] == 0)


def _classify(folder: str, layout: str) -> list[dict[str, Any]]:
    trainer = small_trainer(configure(folder, layout, {"validation.freq": 1}))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [record for record in trainer.history if "validation_loss" in record]


def test_a_classifier_s_scores_do_not_count_those_of_the_average(tmp_path: Path) -> None:
    [plain] = run_world(_classify, 1, str(tmp_path), "one classification", timeout=100)
    [both] = run_world(_classify, 1, str(tmp_path), "one classification ema", timeout=100)
    names = ("validation_loss", "validation_accuracy", "validation_f1")
    assert len(both) == 2 and "validation_ema_accuracy" in both[1] and "validation_ema_f1" in both[1]
    for name in names:
        assert [record[name] for record in both] == [record[name] for record in plain]


def test_an_adapter_is_merged_from_its_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(tmp_path / "base" / "checkpoint" / "step-2")
    run_world(_train, 1, str(tmp_path / "base"), {}, 2, timeout=100)
    lora = {"finetune": {"adapter": "lora", "lora": {"rank": 2}}}
    run_world(_train_adapter, 1, str(tmp_path / "lora"), base, lora, timeout=100)
    step = str(tmp_path / "lora" / "checkpoint" / "step-2")
    merged = {}
    for name, flags in {"ema": ["--ema"], "plain": []}.items():
        assert _convert("merge", base, step, str(tmp_path / name), *flags) == 0
        merged[name] = load_file(tmp_path / name / "model.safetensors")
    changed = {name for name, it in merged["ema"].items() if not torch.equal(it, merged["plain"][name])}
    assert changed == {name for name in merged["ema"] if "q_proj" in name or "v_proj" in name}
    assert _convert("dcp-to-hf", step, str(tmp_path / "again"), "--ema") == 0
    assert _convert("hf-to-dcp", str(tmp_path / "plain"), str(tmp_path / "none"), "--ema") == 3
    assert "only these have an EMA" in capsys.readouterr().err
    manifest = Path(step) / "manifest.json"
    assert json.loads(manifest.read_text())["run"]["base"]


def _train_adapter(folder: str, base: str, tables: dict[str, Any]) -> None:
    config = small_config(
        folder,
        training={"steps": 2, "global_batch_size": 4, "local_batch_size": 1},
        optimizer={"ema_decay": DECAY, "lr": 1e-2},
        checkpoint={"enable": True, "interval": 2, "initial_load_path": base},
        **tables,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        small_trainer(config).train()
