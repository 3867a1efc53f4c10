"""``llama-toolkit checkpoint average``: the mean of weights, from any mesh, and what has none."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.checkpoint.manifest import read_manifest
from toolkit.cli import run_command
from toolkit.weights.open import open_weights

Call = Callable[..., tuple[int, str]]


def _train(folder: str, steps: int, tables: dict[str, Any]) -> None:
    config = small_config(
        folder,
        training={"steps": steps, "global_batch_size": 4, "local_batch_size": 1},
        lr_scheduler={"warmup_steps": 1, "decay_type": "constant"},
        optimizer={"lr": 1e-2},
        **{"checkpoint": {"enable": True, "interval": 1, "keep_latest_k": 0}} | tables,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        small_trainer(config).train()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train steps 1 and 2 on two ranks, and 3 on one."""
    folder = tmp_path_factory.mktemp("run")
    run_world(_train, 2, str(folder), 2, {}, timeout=100)
    run_world(_train, 1, str(folder), 3, {}, timeout=100)
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: object) -> tuple[int, str]:
        code = run_command("checkpoint", ["average", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.mark.parametrize(
    ("paths", "flags", "steps"),
    [
        ([""], [], (1, 2, 3)),
        (["checkpoint"], ["--last", "2"], (2, 3)),
        ([""], ["--steps", "3,1"], (3, 1)),
        (["checkpoint/step-2", "checkpoint/step-1"], [], (2, 1)),
    ],
)
def test_the_mean_of_chosen_steps(
    run: Path, tmp_path: Path, call: Call, paths: list[str], flags: list[str], steps: tuple[int, ...]
) -> None:
    code, said = call(*(run / path for path in paths), tmp_path / "out", *flags)
    assert code == 0 and "--checkpoint.initial_load_path" in said
    found = open_weights(tmp_path / "out")
    sources = [open_weights(run / "checkpoint" / f"step-{step}") for step in steps]
    assert found.tensors == sources[0].tensors
    for name in found.tensors:
        values = torch.stack([source.read(name).double() for source in sources])
        torch.testing.assert_close(found.read(name).double(), values.mean(0), rtol=1e-6, atol=1e-8)
    about = read_manifest(tmp_path / "out" / "step-0")["run"]
    assert about["averaged"] == [str(run / "checkpoint" / f"step-{step}") for step in steps]


def test_a_run_starts_from_it_and_it_is_exported(run: Path, tmp_path: Path, call: Call) -> None:
    assert call(run, tmp_path / "out" / "step-7")[0] == 0
    path = str(tmp_path / "out" / "step-7")
    tables = {"checkpoint": {"enable": True, "initial_load_path": path}}
    run_world(_train, 1, str(tmp_path / "next"), 1, tables, timeout=100)
    assert run_command("convert", ["dcp-to-hf", path, str(tmp_path / "hf"), "--verify"]) == 0


def test_what_has_no_mean(run: Path, tmp_path: Path, call: Call) -> None:
    out, steps = tmp_path / "out", run / "checkpoint"
    lora = {"finetune": {"adapter": "lora", "lora": {"rank": 2}}}
    run_world(_train, 1, str(tmp_path / "lora"), 2, lora, timeout=100)
    run_world(_train, 1, str(tmp_path / "wider"), 1, {"model": {"ffn_dim": 96}}, timeout=100)
    wrong = {
        "available: 1, 2, 3": (run, out, "--steps", "1,4"),
        "two or more checkpoints": (steps / "step-1", out),
        "each once": (run, steps / "step-1", out),
        "has steps of a run": (run, steps / "step-9"),
        "has only an adapter": (tmp_path / "lora", out),
        "are of different models": (run, tmp_path / "wider", out),
        "no such folder": (steps / "step-1", steps / "step-8", out),
    }
    for expected, words in wrong.items():
        code, said = call(*words)
        assert code == 3 and expected in said, (expected, said)
    with pytest.raises(SystemExit, match="2"):
        call(steps / "step-1", steps / "step-2", out, "--last", "2")
    assert not out.exists() and not (steps / "step-9").exists()
