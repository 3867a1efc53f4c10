"""Inputs of checkpointed blocks go to the host and come back as they were.

The CPU stands for the device as well, so that this shows which tensors go and that nothing else holds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import run_world
from tests.models.small_llama import build, small, tokens_and_labels
from tests.training import small_config, small_trainer, weights_digest
from toolkit.config.parallelism import ActivationCheckpoint
from toolkit.parallel import activation_offload
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint
from toolkit.parallel.activation_offload import HostCopy, apply_activation_offload

ROWS, LENGTH, LAYERS = 2, 40, 4
ARGS = small(n_layers=LAYERS)
TOKENS, LABELS = tokens_and_labels(ROWS, LENGTH)
DOCUMENTS = (torch.arange(LENGTH) // 7).expand(ROWS, LENGTH)
MODES = {
    "full": (ActivationCheckpoint(mode="full"), LAYERS),
    "every 2nd": (ActivationCheckpoint(mode="selective"), LAYERS // 2),
    "op": (ActivationCheckpoint(mode="selective", selective_ac_option="op"), LAYERS),
}


class Counted(HostCopy):
    """Shapes of what goes, and of what comes back."""

    gone: list[tuple[int, ...]] = []
    order: list[tuple[str, int]] = []
    came: list[tuple[int, ...]] = []

    def __init__(self, tensor: Tensor):
        super().__init__(tensor)
        self.number = len(self.gone)
        self.gone.append(tuple(tensor.shape))

    def fetch(self) -> None:
        self.order.append(("fetch", self.number))
        super().fetch()

    def to_device(self) -> Tensor:
        self.came.append(tuple(self.host.shape))
        self.order.append(("back", self.number))
        return super().to_device()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(activation_offload, "HostCopy", Counted)
    monkeypatch.setattr(Counted, "gone", [])
    monkeypatch.setattr(Counted, "came", [])
    monkeypatch.setattr(Counted, "order", [])
    return Counted


def _step(options: ActivationCheckpoint, *, offload: bool) -> tuple[list[Tensor], list[bool]]:
    """Gradients; and of the inputs of checkpointed blocks, if anything held them before the backward."""
    model = build(ARGS, torch.float32)
    apply_activation_checkpoint(model.layers, options)
    if offload:
        apply_activation_offload(model.layers)
    inputs: list[StorageWeakRef] = []

    def seen(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    every = 2 if options.mode == "selective" and not options.by_operator else 1
    handles = [block.register_forward_pre_hook(seen) for block in [*model.layers.values()][::every]]
    loss = model(TOKENS, labels=LABELS, documents=DOCUMENTS)
    held = [not storage.expired() for storage in inputs]
    for handle in handles:
        handle.remove()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], held


@pytest.mark.parametrize("mode", MODES)
def test_inputs_of_checkpointed_blocks_go_and_nothing_holds_them(mode: str, counted: type[Counted]) -> None:
    options, blocks = MODES[mode]
    plain, held = _step(options, offload=False)
    assert held == [True] * blocks and not counted.gone
    offloaded, held = _step(options, offload=True)
    assert held == [False] * blocks
    assert counted.gone == counted.came == [(ROWS, LENGTH, ARGS.dim)] * blocks
    assert len(plain) == len(offloaded) > 0
    assert all(torch.equal(mine, other) for mine, other in zip(offloaded, plain, strict=True))


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_input_is_fetched_when_a_backward_begins(prefetch: bool, counted: type[Counted]) -> None:
    model = build(ARGS, torch.float32)
    apply_activation_checkpoint(model.layers, ActivationCheckpoint(mode="full"))
    apply_activation_offload(model.layers, prefetch=prefetch)
    model(TOKENS, labels=LABELS).backward()
    next_one = [("fetch", number - 1) for number in range(LAYERS) if prefetch]
    expected = []
    for number in reversed(range(LAYERS)):
        expected += [("back", number), ("fetch", number), *(next_one[number : number + 1] if number else [])]
    assert counted.order == expected


def test_without_gradients_nothing_goes(counted: type[Counted]) -> None:
    model = build(ARGS, torch.float32)
    apply_activation_checkpoint(model.layers, ActivationCheckpoint(mode="full"))
    apply_activation_offload(model.layers)
    with torch.no_grad():
        model(TOKENS, labels=LABELS)
    assert not counted.gone


PP = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_microbatch_size": 2,
    **{f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")},
}
RUNS: dict[str, dict[str, Any]] = {
    "fsdp": {
        "parallelism": {"fsdp_wrap_policy": "class", "fsdp_wrap_classes": ["TransformerBlock", "Attention"]}
    },
    "tp": {"parallelism": {"tensor_parallel_degree": 2}},
    "pp": {"parallelism": PP},
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "compiled in parts": {
        "model": {"name": "qwen3_moe", "ffn_dim": None},
        "parallelism": {"expert_parallel_degree": 2},
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    },
    "compiled tp": {
        "parallelism": {"tensor_parallel_degree": 2},
        "compile": {"enable": True, "backend": "aot_eager"},
    },
}


def _run(folder: Path, tables: dict[str, Any], offload: bool) -> tuple[list[float], list[str], int]:
    torch._dynamo.reset()
    Counted.gone.clear()
    options = {"mode": "full", "enable_activation_offloading": offload}
    options |= tables.get("activation_checkpoint", {})
    training = {"steps": 2, "seq_len": 32, "local_batch_size": 4}
    tables = tables | {"training": training, "activation_checkpoint": options}
    trainer = small_trainer(small_config(folder, **tables))
    trainer.train()
    losses = [record["loss"] for record in trainer.history]
    return losses, [weights_digest(model) for model in trainer.model_parts.models], len(Counted.gone)


def _world(folder: str) -> dict[str, Any]:
    activation_offload.HostCopy = Counted  # type: ignore[misc]
    return {
        name: [_run(Path(folder, f"{name} {offload}"), tables, offload) for offload in (False, True)]
        for name, tables in RUNS.items()
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_world, 2, str(tmp_path_factory.mktemp("offload")), timeout=170)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_to_the_bit(world: list[dict[str, Any]], name: str) -> None:
    for (losses, weights, none), (offloaded_losses, offloaded_weights, gone) in (it[name] for it in world):
        assert (losses, weights) == (offloaded_losses, offloaded_weights)
        assert none == 0 and gone > 0
