"""Activation checkpointing changes what is kept and computed again, and no gradient."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as compiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.models.small_llama import build, small, tokens_and_labels
from toolkit.config.finetune import Finetune
from toolkit.config.parallelism import ActivationCheckpoint, Compile
from toolkit.distributed.dtensor import clean_name
from toolkit.finetune.apply import apply_finetune
from toolkit.finetune.nf4 import PackedWeight
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import init_rule
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint
from toolkit.parallel.compile import apply_compile
from toolkit.parallel.init_weights import initialize

ROWS, LENGTH, LAYERS = 2, 40, 3
ARGS = small(n_layers=LAYERS, head_dim=8)
TOKENS, LABELS = tokens_and_labels(ROWS, LENGTH)
DOCUMENTS = (torch.arange(LENGTH) // 7).expand(ROWS, LENGTH)
EXPERTS = small("experts", n_layers=LAYERS)
MODES = {
    "full": ActivationCheckpoint(mode="full"),
    "full, stopped early": ActivationCheckpoint(mode="full", early_stop=True),
    "every 2nd": ActivationCheckpoint(mode="selective"),
    "op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "op, stopped early": ActivationCheckpoint(mode="selective", selective_ac_option="op", early_stop=True),
    "matmul": ActivationCheckpoint(mode="selective", selective_ac_option="matmul"),
}
NONE = ActivationCheckpoint(mode="none")


@pytest.fixture(autouse=True)
def afresh():
    """Blocks of all models share their code, for which torch keeps eight compilations at most."""
    torch._dynamo.reset()
    yield
    apply_activation_checkpoint(torch.nn.ModuleDict(), NONE)


def model_with(
    options: ActivationCheckpoint = NONE, backend: str = "", chunk: int = 0, attention: str = "sdpa"
) -> Decoder:
    model = build(ARGS, torch.float32, loss_chunk_tokens=chunk, attention=attention)
    apply_activation_checkpoint(model.layers, options)
    if backend:
        apply_compile(model, Compile(enable=True, components=["model"], backend=backend))
    return model


def gradients(model: Decoder) -> dict[str, Tensor]:
    model(TOKENS, labels=LABELS, documents=DOCUMENTS).backward()
    found = {clean_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert None not in found.values()
    return found


@pytest.mark.parametrize(
    ("mode", "backend", "chunk"),
    [*product(MODES, [""], [0, 17]), *product(["full", "every 2nd", "op", "matmul"], ["aot_eager"], [17])],
)
def test_gradients_are_those_without(mode: str, backend: str, chunk: int) -> None:
    # The same operators in the same order, once or twice: not even rounding differs, save where the
    # compiler splits an operator into others (RMSNorm).
    expected = gradients(model_with(chunk=chunk))
    found = gradients(model_with(MODES[mode], backend, chunk))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5 if backend else 0)


@pytest.mark.parametrize(
    ("mode", "backend"), [*product(MODES, [""]), *product(["full", "op"], ["aot_eager"])]
)
def test_experts_are_chosen_once(mode: str, backend: str) -> None:
    """Biases that change between forward and backward would change a choice made again, and no gradient."""

    def gradients(options: ActivationCheckpoint, change: float) -> dict[str, Tensor]:
        model = Decoder(EXPERTS).double()
        initialize(
            [*model.named_parameters(), *model.named_buffers()], 1, lambda name: init_rule(name, EXPERTS)
        )
        apply_activation_checkpoint(model.layers, options, compiled=bool(backend))
        if backend:
            apply_compile(model, Compile(enable=True, components=["model"], backend=backend))
        loss = model(TOKENS, labels=LABELS)
        for bias in model.buffers():
            bias.data += change * torch.arange(len(bias))  # of which autograd does not know
        loss.backward()
        with torch.no_grad():
            assert change == 0 or not torch.equal(model(TOKENS, labels=LABELS), loss), "another choice"
        return {clean_name(name): it.grad for name, it in model.named_parameters() if it.grad is not None}

    torch.testing.assert_close(gradients(MODES[mode], 0.1), gradients(NONE, 0.0), rtol=1e-9, atol=1e-12)


class _Watch(TorchDispatchMode):
    """Counts operators, and knows the storages that they made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.name()] += 1
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def _watch(options: ActivationCheckpoint, attention: str = "sdpa") -> tuple[int, Counter[str]]:
    """Bytes that are kept after a forward, and the operators of its backward."""
    model = model_with(options, attention=attention)
    with _Watch() as forward:
        loss = model(TOKENS, labels=LABELS)
    kept = forward.bytes_alive()
    with _Watch() as backward:
        loss.backward()
    return kept, backward.calls


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def watched() -> dict[str, tuple[int, Counter[str]]]:
    return {name: _watch(options) for name, options in {"none": NONE, **MODES}.items()}


def test_what_is_computed_again(watched: dict[str, tuple[int, Counter[str]]]) -> None:
    plain = watched["none"][1]
    again = {mode: calls - plain for mode, (_, calls) in watched.items()}
    # (matmuls, attentions) of a block: all are q k v o w1 w2 w3, of which "op" repeats w1 and w3.
    expected = {"full": (7, 1), "full, stopped early": (6, 1), "op": (2, 0), "op, stopped early": (2, 0)}
    expected["matmul"] = (0, 0)
    for mode, (matmuls, attentions) in expected.items():
        assert again[mode]["aten::mm"] == LAYERS * matmuls, mode
        assert again[mode][ATTENTION] == LAYERS * attentions, mode
        assert again[mode]["aten::silu"] == LAYERS, mode
    assert (again["every 2nd"]["aten::mm"], again["every 2nd"][ATTENTION]) == (2 * 7, 2)


def test_blockwise_attention_is_kept_by_operator_and_takes_less_memory(
    watched: dict[str, tuple[int, Counter[str]]],
) -> None:
    again = {mode: _watch(MODES[mode], "blockwise")[1]["toolkit::blockwise_attention"] for mode in MODES}
    assert (again["full"], again["op"]) == (LAYERS, 0)
    assert _watch(NONE, "blockwise")[0] < watched["none"][0]


def test_what_is_kept(watched: dict[str, tuple[int, Counter[str]]]) -> None:
    kept = {mode: size for mode, (size, _) in watched.items()}
    # q, k, v, attention with the log-sum-exp of each head, o, w2.
    by_operator = 4 * ARGS.dim + 2 * ARGS.n_kv_heads * ARGS.head_dim + ARGS.n_heads
    assert kept["op"] - kept["full"] == LAYERS * ROWS * LENGTH * by_operator * 4
    assert kept["op"] - kept["full"] < (kept["none"] - kept["full"]) / 2
    assert kept["matmul"] - kept["op"] == LAYERS * ROWS * LENGTH * 2 * ARGS.ffn_dim * 4
    assert kept["full"] < kept["every 2nd"] < kept["none"] and kept["matmul"] < kept["none"]


def _saved_bytes(model: Decoder) -> int:
    """Bytes that autograd keeps of a forward, parameters left out."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(TOKENS, labels=LABELS, documents=DOCUMENTS)
    return sum(saved.values())


def test_memory_budget_keeps_less() -> None:
    expected, plain = gradients(model_with()), _saved_bytes(model_with(backend="aot_eager"))
    torch._dynamo.reset()
    model = model_with(ActivationCheckpoint(mode="memory_budget", memory_budget=0.1), "aot_eager")
    torch.testing.assert_close(gradients(model), expected, rtol=2e-5, atol=1e-5)
    assert _saved_bytes(model) < plain / 2
    assert model_with() and compiler.activation_memory_budget == 1.0, "the next run's own"


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"]}},
    "dora": {"adapter": "lora", "lora": {"target_modules": ["all-linear"], "use_dora": True}},
    "qlora": {"adapter": "lora", "lora": {"quantize_base": "nf4"}},
    "prefix": {"adapter": "prefix_tuning"},
    "llama_adapter": {"adapter": "llama_adapter"},
}


def _adapted(name: str, budget: float) -> Decoder:
    """A model with an adapter of random numbers, compiled to keep the part ``budget`` of its activations."""
    with torch.device("meta"):
        model = Decoder(replace(ARGS, ffn_dim=128), loss_chunk_tokens=0)
    apply_finetune(model, Finetune.model_validate(ADAPTERS[name]), frozen_dtype=torch.float32)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        filled: Any = parameter.data if parameter.is_floating_point() else PackedWeight(parameter.data)
        filled.copy_(torch.randn(filled.shape, generator=generator) * 0.1)
    apply_activation_checkpoint(
        model.layers, ActivationCheckpoint(mode="memory_budget", memory_budget=budget)
    )
    apply_compile(model, Compile(enable=True, components=["model"], backend="aot_eager"))
    return model


# Of DoRA's graph, the largest, half a minute goes into choosing what is kept.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "dora" else []) for name in ADAPTERS]
)
def test_memory_budget_keeps_less_beside_an_adapter(name: str) -> None:
    kept, found = [], []
    for budget in (1.0, 0.1):
        torch._dynamo.reset()
        model = _adapted(name, budget)
        kept.append(_saved_bytes(model))
        model(TOKENS, labels=LABELS, documents=DOCUMENTS).backward()
        found.append({key: it.grad for key, it in model.named_parameters() if it.requires_grad})
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in found[0].values())
    assert kept[1] < 0.7 * kept[0]


def test_the_choices_of_a_memory_budget_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run" / "memory_budget"
    options = ActivationCheckpoint(mode="memory_budget", visualize_memory_budget_pareto=True)
    apply_activation_checkpoint(torch.nn.ModuleDict(), options, pareto_folder=folder)
    # A block would do as well, and take ten times as long to draw.
    torch.compile(lambda x: (x.sin() @ x).cos(), backend="aot_eager")(torch.ones(9, 9, requires_grad=True))
    assert list(folder.glob("*.svg"))
