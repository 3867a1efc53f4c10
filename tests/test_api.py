"""The Python API, as docs/python.md shows it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import toolkit
from tests.helpers import run_world
from toolkit.errors import ConfigError
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve

ROOT = Path(__file__).parents[1]
RUN, LOOP, SAVING, GENERATION = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL
)
FILE, FOLDER = '"train_configs/debug_model.toml"', '"outputs/my_run/hf/step-5"'
SMALL = f"""
[job]
dump_folder = "FOLDER/run"
[model]
hf_assets_path = "{ROOT}/tests/assets/tokenizer"
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 128
[training]
dataset = "embedded_validation"
seq_len = 64
local_batch_size = 4
global_batch_size = 16
mixed_precision_param = "float32"
device = "cpu"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
enable_tensorboard = false
[data]
cache_folder = "FOLDER/cache"
[checkpoint]
enable = true
interval = 5
last_save_in_hf = true
"""


def _said(block: str, file: Path) -> list[str]:
    """Return the lines that a block of the page prints with another file."""
    assert FILE in block
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(block.replace(FILE, repr(str(file))), "docs/python.md", "exec"), {})
    return said.getvalue().splitlines()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    file = folder / "small.toml"
    file.write_text(SMALL.replace("FOLDER", str(folder)))
    return file


@pytest.fixture(scope="module")
def losses(file: Path) -> list[float]:
    """Losses of the command's run, which leaves a Hugging Face folder."""
    command = [sys.executable, "-m", "toolkit.train", "--job.config_file", str(file), "--training.steps", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (file.parent / "run" / "metrics.jsonl").open()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_has_the_losses_of_the_command(file: Path, losses: list[float], ranks: int) -> None:
    assert len(LOOP.strip().splitlines()) <= 30
    for said in run_world(_said, ranks, LOOP, file):
        # fp32: FSDP, clipping by torch and another number of ranks add in another order.
        assert [float(line.split()[1]) for line in said] == pytest.approx(losses, rel=1e-6)


def _saving_loop(until: int, out: Path) -> str:
    """Return the page's loop with its three lines for checkpoints, ending after ``until`` steps."""
    first, save, export = SAVING.strip().splitlines()
    loop, body = LOOP.split("    for step in range(config.training.steps):\n")
    export = export.replace('"my-model"', repr(str(out)))
    return f"{loop}    {first}\n    for step in range(first, {until}):\n{body}        {save}\n    {export}\n"


def test_a_loop_is_saved_resumed_and_exported(file: Path, losses: list[float]) -> None:
    """By itself on other ranks, and by the command."""
    folder, other = file.parent / "saved", file.with_name("saved.toml")
    other.write_text(file.read_text().replace("/run", "/saved"))
    said = [run_world(_said, 2, _saving_loop(3, folder / "three"), other)[0]]
    saved = shutil.copytree(folder / "checkpoint", file.parent / "command" / "checkpoint")
    said.append(run_world(_said, 1, _saving_loop(5, folder / "five"), other)[0])
    found = [float(line.split()[1]) for lines in said for line in lines]
    assert found == pytest.approx(losses, rel=1e-6)
    command = [sys.executable, "-m", "toolkit", "checkpoint", "verify", str(folder)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.count(": sound\n") == 5
    again = [sys.executable, "-m", "toolkit.train", str(other), f"--job.dump_folder={saved.parent}"]
    done = subprocess.run(again + ["--training.steps=5"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line)["loss"] for line in (saved.parent / "metrics.jsonl").open()]
    assert logged == pytest.approx(losses[3:], rel=1e-6)
    ours, commands = (
        load_file(it / "model.safetensors") for it in (folder / "five", file.parent / "run/hf/step-5")
    )
    assert ours.keys() == commands.keys()
    # Adam divides by the size of a gradient, so that orders of addition show where that is near 0.
    assert all(torch.allclose(ours[name], commands[name], rtol=1e-4, atol=1e-5) for name in ours)


def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    small = [it.replace('"debug_model", {', '"debug_model", {**small, ') for it in code]
    values = {"model.dim": 64, "training.seq_len": 64, "training.dataset": "embedded_validation"}
    values |= {"training.device": "cpu", "validation.enable": False}
    assert sum(map(str.count, small, ["**small"] * len(small))) == 2
    program = "\n".join([f"small = {values!r}", *small])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"2\d \d", line)]
    assert steps == ["21", "22", "23", "24", "25"]


def test_run_trains_as_the_command_does(file: Path, losses: list[float]) -> None:
    other = file.with_name("other.toml")
    other.write_text(file.read_text().replace("/run", "/other"))
    [said] = run_world(_said, 1, RUN, other)
    assert float(said[-1]) == losses[-1]


def _run(file: Path, overrides: dict[str, Any]) -> int:
    """Return the number of logged steps."""
    return len(toolkit.run(toolkit.load_config(file, overrides)))


def test_run_applies_the_health_table(file: Path) -> None:
    other = file.with_name("health.toml")
    other.write_text(file.read_text().replace("/run", "/health"))
    assert run_world(_run, 1, other, {"health.heartbeat_seconds": 60, "training.steps": 1}) == [1]
    assert (file.parent / "health" / "heartbeat.json").exists()


def test_a_dry_run_is_rejected_by_key(file: Path) -> None:
    with pytest.raises(ConfigError, match="comm.mode"):
        _run(file, {"comm.mode": "fake_backend"})


def test_generation_gives_the_text_of_the_tool(file: Path, losses: list[float]) -> None:
    folder = file.parent / "run" / "hf" / "step-5"
    code = GENERATION.replace(FOLDER, repr(str(folder)))
    command = [sys.executable, "-m", "toolkit", "generate", str(folder), "--prompt", "It was"]
    command += ["--max-new-tokens", "20", "--temperature", "0"]
    ours, tool = (
        subprocess.run(it, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
        for it in ([sys.executable, "-c", code], command)
    )
    assert "It was" + ours == tool and ours.strip()


def test_weights_are_loaded_into_a_model_of_any_layout(file: Path, losses: list[float]) -> None:
    assert run_world(_loaded, 2, file) == [True, True]


def _loaded(file: Path) -> bool:
    """Return whether sharded parameters are those of the folder, which safetensors reads."""
    config = toolkit.load_config(file)
    folder = file.parent / "run" / "hf" / "step-5"
    with toolkit.start(config) as device:
        model = toolkit.new_model(config, toolkit.open_data(config))
        fully_shard(model)
        model.to_empty(device=device)
        toolkit.load_weights(model, folder)
        ours = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    theirs = load_file(folder / "model.safetensors")
    names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    return all(torch.equal(ours[name], theirs[other]) for name, other in names.items())


def test_what_a_loop_of_ones_own_does_not_build_is_rejected_by_key(file: Path) -> None:
    asked = {"finetune.adapter": "lora", "parallelism.tensor_parallel_degree": 2, "loss.z_loss": 1e-4}
    asked |= {"training.epochs": 1}
    config = toolkit.load_config(file, asked)
    with pytest.raises(ConfigError) as error:
        toolkit.new_model(config, toolkit.open_data(config))
    assert [it.key for it in error.value.problems] == [
        "finetune",
        "loss",
        "training.epochs",
        "parallelism.tensor_parallel_degree",
    ]


def test_a_decoder_that_is_built_by_hand_has_initial_weights() -> None:
    torch.manual_seed(0)
    model = Decoder(resolve("llama3", "debugmodel", vocab_size=512))
    logits = model(torch.arange(16)[None])
    assert logits.isfinite().all() and 0.05 < logits.std() < 5


def test_every_name_is_documented_and_imports_torch_only_when_it_is_used() -> None:
    from toolkit import api

    assert all(getattr(toolkit, name).__doc__ for name in toolkit.__all__)
    own = {name for name, it in vars(api).items() if getattr(it, "__module__", "") == api.__name__}
    assert {name for name in own if not name.startswith("_")} <= {*toolkit.__all__}
    stub = (ROOT / "toolkit" / "__init__.pyi").read_text()
    assert re.findall(r"import (\w+) as", stub) == toolkit.__all__
    code = "import sys, toolkit; from toolkit import preflight; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    with pytest.raises(AttributeError, match="no_such_name"):
        toolkit.no_such_name  # noqa: B018
