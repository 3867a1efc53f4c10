"""A family registered by a module outside of the toolkit: a parameter, a buffer and a loss of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.extensions.test_extensions import ROOT, python
from tests.models import gated_family
from toolkit.errors import ConfigError
from toolkit.models.common.block_output import BlockSums
from toolkit.models.common.parameter_table import ParameterRow, block_rows
from toolkit.models.meta_decoder import meta_decoder
from toolkit.models.parameters import table
from toolkit.models.registry import resolve, spec
from toolkit.parallel.init_weights import initialize

ARGS = resolve("gated", "debugmodel", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64)


def test_it_is_short() -> None:
    assert Path(gated_family.__file__).read_text().count("\n") <= 150


def test_losses_of_blocks_join_the_objective_once() -> None:
    """Gradients are those of the sum that the blocks and the head return."""
    model = meta_decoder(ARGS).to_empty(device="cpu").double()
    rows = table(ARGS)
    initialize([*model.named_parameters(), *model.named_buffers()], 1, lambda name: rows[name].init)
    tokens = torch.arange(32).reshape(2, 16) % 64
    scale = torch.tensor(0.25, dtype=torch.float64)

    model.block_sums.scale = scale
    loss = model(tokens, labels=tokens.roll(-1, 1))
    (loss * scale).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    reported = {name: model.block_sums.take(name, scale) for name in spec("gated").metric_names(ARGS)}
    assert not model.block_sums.sums

    model.zero_grad()
    outputs = []
    for block in model.layers.values():
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    model.block_sums = BlockSums()  # without a scale: blocks do not count
    total = model(tokens, labels=tokens.roll(-1, 1))
    own = sum(output.losses["gate_loss"] for output in outputs)
    ((total + own) * scale).backward()
    assert total.item() == loss.item() and reported["gate_loss"].item() == pytest.approx(
        own.item(), rel=1e-12
    )
    assert own.item() > 0 and 0 < reported["gate_open"].item() < 2 * tokens.numel() * ARGS.n_layers
    for name, parameter in model.named_parameters():
        # fp64 rounding of sums in another order
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("wrong", ["without its row", "a row too many", "another shape", "no buffer"])
def test_a_decoder_and_rows_that_differ_are_rejected(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(self: object, args: object, layer: int) -> list[ParameterRow]:
        *rows, gate, temperature = rows_of(spec("gated"), ARGS, layer)
        if wrong == "without its row":
            return [*rows, temperature]
        if wrong == "a row too many":
            return [*rows, gate, temperature, ParameterRow("gate.other", (1,), gate.init, "gate.other")]
        if wrong == "another shape":
            return [*rows, ParameterRow("gate.weight", (3,), gate.init, "gate.weight"), temperature]
        return [*rows, gate, ParameterRow("gate.temperature", (1,), gate.init, "gate.temperature")]

    rows_of = gated_family.Gated.block
    monkeypatch.setattr(gated_family.Gated, "block", block)
    table.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"GatedDecoder, and the rows of the family differ in layers\.0\.gate"
        ):
            meta_decoder(ARGS)
    finally:
        table.cache_clear()


def test_other_families_have_the_usual_block() -> None:
    assert [row.name for row in block_rows(ARGS, 0)] == [
        row.name.removeprefix("layers.0.") for row in table(resolve("llama3.1", "debugmodel")).blocks[0]
    ]


CONFIG = f"""
[job]
custom_import = "gated_family"
dump_folder = "out"
[model]
name = "gated"
flavor = "debugmodel"
hf_assets_path = "{ROOT}/tests/assets/tokenizer"
dim = 64
n_layers = 4
ffn_dim = 128
[training]
dataset = "embedded"
seq_len = 64
local_batch_size = 2
global_batch_size = 8
dtype = "float64"
mixed_precision_param = "float64"
mixed_precision_reduce = "float64"
steps = 4
device = "cpu"
[lr_scheduler]
warmup_steps = 0
decay_type = "constant"
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 2
[data]
cache_folder = "cache"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_family")
    (folder / "gated_family.py").write_text(Path(gated_family.__file__).read_text())
    (folder / "run.toml").write_text(CONFIG)
    return folder


def train(folder: Path, name: str, ranks: int, *flags: str) -> list[list[float]]:
    words = ["toolkit.launch", "--job.config_file=run.toml", f"--job.dump_folder={name}", *flags]
    python(folder, *words, NGPU=str(ranks))
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    kept = ("loss", "grad_norm", "gate_loss", "gate_open")
    return [[line[key] for key in kept] for line in lines if "grad_norm" in line]


def test_it_trains_saves_moves_to_another_mesh_exports_and_generates(folder: Path) -> None:
    alone = train(folder, "alone", 1)
    train(folder, "moved", 2, "--parallelism.tensor_parallel_degree=2", "--training.steps=2")
    flags = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.fsdp_reshard_after_forward=never"]
    moved = train(folder, "moved", 4, *flags)
    assert len(moved) == len(alone) == 4
    for ours, other in zip(moved, alone, strict=True):
        assert ours == pytest.approx(other, rel=1e-9)  # fp64 rounding
    for name in ("alone", "moved"):
        words = ["--custom-import=gated_family", "dcp-to-hf", f"{name}/checkpoint/step-4", f"hf-{name}"]
        python(folder, "toolkit", "convert", *words)
    from safetensors.torch import load_file

    left, right = (load_file(folder / f"hf-{name}" / "model.safetensors") for name in ("alone", "moved"))
    assert left.keys() == right.keys() >= {"model.layers.3.gate.weight", "model.layers.3.gate.temperature"}
    assert all(torch.allclose(left[key], right[key], rtol=1e-6, atol=1e-9) for key in left)
    words = [
        "toolkit",
        "generate",
        "hf-moved",
        "--custom-import=gated_family",
        "--prompt=The",
        "--max-new-tokens=4",
    ]
    python(folder, *words)


def test_dry_run_and_planner_know_it(folder: Path) -> None:
    flags = ["--job.config_file=run.toml", "--comm.mode=fake_backend"]
    said = python(folder, "toolkit.train", *flags, NGPU="4")
    assert "gate" in said
    plan = ["toolkit", "plan", "run.toml", "--gpu=h100", "--gpus=1", "--training.device=auto"]
    plan += ["--training.dtype=float32", "--training.mixed_precision_param=bfloat16"]
    assert "parameters on 1" in python(folder, *plan)
