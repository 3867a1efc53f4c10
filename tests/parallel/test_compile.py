"""A compiled run is the run: names, weights, losses and gradients; and each graph is compiled once."""

from __future__ import annotations

import os
import warnings
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor
from torch import Tensor
from torch._dynamo.utils import counters

from tests import mesh_runs
from tests.finetune.adapters import adapted, adapter_of
from tests.helpers import run_world
from tests.models.small_llama import build, small, tokens_and_labels
from tests.training import small_config, small_trainer, weights_digest
from toolkit.config.finetune import Finetune
from toolkit.config.parallelism import ActivationCheckpoint, Compile
from toolkit.distributed.dtensor import clean_name
from toolkit.models.common.decoder import Decoder
from toolkit.parallel import expert_parallel
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint
from toolkit.parallel.compile import CompileClock, apply_compile, set_cache_folder

ROWS, LENGTH = 2, 40
ARGS = small(n_layers=4, head_dim=8)
TOKENS, LABELS = tokens_and_labels(ROWS, LENGTH)
DOCUMENTS = (torch.arange(LENGTH) // 7).expand(ROWS, LENGTH)


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Blocks of all models share their code, for which torch keeps eight compilations at most."""
    torch._dynamo.reset()
    counters.clear()


def compiled_model(options: Compile, mode: str = "none", chunk: int = 0) -> Decoder:
    model = build(ARGS, torch.float32, loss_chunk_tokens=chunk)
    checkpointing = (
        ActivationCheckpoint(mode="selective", selective_ac_option="op")
        if mode == "op"
        else ActivationCheckpoint(mode=mode)  # type: ignore[arg-type]
    )
    apply_activation_checkpoint(model.layers, checkpointing)
    apply_compile(model, options)
    return model


def gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(TOKENS, labels=LABELS, documents=DOCUMENTS)
    loss.backward()
    return loss.detach(), {clean_name(name): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_blocks_share_their_graphs(mode: str) -> None:
    model = compiled_model(Compile(enable=True, components=["model"], backend="aot_eager"), mode)
    kinds = 1 if mode == "none" else 2  # of blocks: with their checkpoint and without
    for _ in range(2):
        gradients(model)
    assert counters["stats"]["unique_graphs"] == kinds
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(TOKENS, labels=LABELS, documents=DOCUMENTS)
    model.train()
    gradients(model)
    assert counters["stats"]["unique_graphs"] == 2 * kinds


ADAPTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lora": {"adapter": "lora", "lora": {"dropout": 0.1}},
    "dora": {"adapter": "lora", "lora": {"use_dora": True}},
    "nf4": {"adapter": "lora", "lora": {"quantize_base": "nf4"}},
    "prefix": {"adapter": "prefix_tuning"},
    "adaption prompt": {"adapter": "llama_adapter"},
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "kept": {"mode": "none"},
    "full": {"mode": "full"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_block_is_one_graph_with_any_adapter_and_checkpoint(adapter: str, tmp_path: Path) -> None:
    args, options = small(n_layers=2, head_dim=8, ffn_dim=128), Finetune(**ADAPTERS[adapter])
    for name, checkpointing in CHECKPOINTS.items():
        torch._dynamo.reset()
        counters.clear()
        model = adapted(adapter_of(options, args, tmp_path)).train()
        apply_activation_checkpoint(model.layers, ActivationCheckpoint(**checkpointing))
        # fullgraph, the default, refuses a second one; by this back end Dynamo alone is asked.
        apply_compile(model, Compile(enable=True, components=["model"], backend="eager"))
        gradients(model)
        # Of an adapter the first block needs no gradient of its input: another graph.
        assert 1 <= counters["stats"]["unique_graphs"] <= 2, name
        assert not counters["graph_break"], name


def _graphs_and_rows(folder: str, layout: str) -> tuple[list[int], list[int]]:
    """Compiled graphs after each of five steps, and the rows that this rank received in each layer."""
    torch._dynamo.reset()
    counters.clear()
    rows, read = [], expert_parallel._row_counts

    def noted(*tensors: Any) -> tuple[list[int], list[int]]:
        sent, received = read(*tensors)
        rows.append(sum(received))
        return sent, received

    trainer, graphs = small_trainer(mesh_runs.configure(folder, layout)), []
    with patch.object(expert_parallel, "_row_counts", noted):
        for batch in islice(trainer.loader, 5):
            trainer.train_step([batch], learning_rate=1e-2)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs, rows


def test_numbers_of_rows_of_experts_share_a_graph(tmp_path: Path) -> None:
    for graphs, rows in run_world(_graphs_and_rows, 2, str(tmp_path), "shard2 ep2 moe aux compiled AC-full"):
        assert len(set(rows)) > 10
        # Attention, shared experts and experts of all layers but the first, which is whole; loss, its tail.
        assert graphs == [6] * 5


def test_only_the_components_named_are_compiled() -> None:
    expected = gradients(build(ARGS, torch.float32))
    loss = compiled_model(Compile(enable=True, components=["loss"], backend="aot_eager"), chunk=33)
    torch.testing.assert_close(gradients(loss), expected, rtol=2e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2, "chunks of 33, 33 and 14 tokens"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_torch_is_asked_for_the_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def record(function: Any, **options: Any) -> Any:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", record)
    compiled_model(Compile(enable=True, mode=mode))  # type: ignore[arg-type]
    expected = {"backend": "inductor", "fullgraph": True, "dynamic": False}
    if mode != "default":
        expected |= {"mode": mode}
        assert mode in torch._inductor.list_mode_options()
    assert asked == [expected] * (ARGS.n_layers + 1), "each block, and the loss"


def test_the_clock_counts_each_compilation_once() -> None:
    clock = CompileClock()
    model = compiled_model(Compile(enable=True, backend="aot_eager"))
    gradients(model)
    assert clock.take() > 0.01, "a block and the loss, forward and backward"
    gradients(model)
    assert clock.take() == 0


def test_the_cache_folder_is_the_users_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, "/theirs")
    set_cache_folder(Path("ours"))
    assert os.environ[variable] == "/theirs"
    monkeypatch.delenv(variable)
    set_cache_folder(Path("ours"))
    assert os.environ[variable] == "ours"


def test_inductor_gives_the_gradients_and_reads_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = gradients(build(ARGS, torch.float32, loss_chunk_tokens=33))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = gradients(compiled_model(Compile(enable=True), "op", chunk=33))
    assert not [warning for warning in said if "complex" in str(warning.message)]
    # Fused kernels add in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    counters.clear()
    assert gradients(compiled_model(Compile(enable=True), "op", chunk=33)) is not None
    assert counters["aot_autograd"]["autograd_cache_hit"] == counters["stats"]["unique_graphs"] > 0


def _train(folder: str) -> dict[str, Any]:
    """An eager and a compiled run in one process group."""
    runs: dict[str, Any] = {}
    tables = {
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        # Compiles anew, without gradients: its time is not that of the step after it.
        "validation": {
            "enable": True,
            "dataset": "embedded_validation",
            "freq": 2,
            "steps": 1,
            "seq_len": 64,
            "local_batch_size": 4,
        },
    }
    for name in ("eager", "compiled"):
        torch._dynamo.reset()
        training = {"steps": 3, "local_batch_size": 4, "loss_chunk_tokens": 100}
        trainer = small_trainer(
            small_config(
                Path(folder, name),
                training=training,
                checkpoint={"enable": True, "interval": 100},
                **(tables if name == "compiled" else {}),
            )
        )
        weights = weights_digest(trainer.model_parts.models[0])
        assert trainer.train() == 0
        steps = [record for record in trainer.history if "loss" in record]
        runs[name] = {
            "weights": weights,
            "names": sorted(trainer.checkpointer.tensors(model_only=False)),
            "losses": [record["loss"] for record in steps],
            "norms": [record["grad_norm"] for record in steps],
            "validations": len(trainer.history) - len(steps),
            "compiling": ["compile_seconds" in record for record in steps],
        }
    return runs


def test_a_compiled_run_is_the_run(tmp_path: Path) -> None:
    eager, compiled = run_world(_train, 2, str(tmp_path), timeout=240)[0].values()
    assert eager["compiling"] == [False] * 3
    assert compiled["compiling"] == [True, False, False] and compiled["validations"] == 2
    assert compiled["weights"] == eager["weights"] and compiled["names"] == eager["names"]
    torch.testing.assert_close(compiled["losses"], eager["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled["norms"], eager["norms"], rtol=1e-5, atol=0)
