"""Linear layers by oneDNN: torch's values and gradients, and torch's own kernel where oneDNN is no faster."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit import build
from toolkit.cpu import linear
from toolkit.cpu.linear import OneDNNLinear, onednn_linear, replace_linears
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.registry import resolve
from toolkit.parallel.activation_checkpoint import policy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "faster", "zen_4"),
    [
        ("GenuineIntel", "6", ["avx2", "avx512f"], False, False),
        ("AuthenticAMD", "23", ["avx2"], False, False),
        ("AuthenticAMD", "25", ["avx2"], False, True),  # Zen 3: never asked
        ("AuthenticAMD", "25", ["avx2", "avx512f"], True, True),
        ("AuthenticAMD", "26", ["avx2", "avx512f"], True, False),
    ],
)
def test_processors(
    vendor: str, family: str, flags: list[str], faster: bool, zen_4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"vendor_id": [vendor], "cpu family": [family], "flags": flags}
    monkeypatch.setattr(linear, "processor", lambda: fields)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert (linear.is_faster.__wrapped__(), linear._is_zen_4.__wrapped__()) == (faster, zen_4)
    monkeypatch.setattr(linear, "processor", dict)  # outside Linux
    assert not linear.is_faster.__wrapped__()


def _grads(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    out = layer(x)
    wanted = [it for it in (x, *layer.parameters()) if it.requires_grad]
    return [out, *torch.autograd.grad((out * grad).sum(), wanted)]


@pytest.mark.parametrize("zen_4", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_values_and_gradients_are_torch_s(
    zen_4: bool, bias: bool, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_is_zen_4", lambda: zen_4)
    plain = nn.Linear(256, 700, bias=bias)
    plain.weight.requires_grad_(frozen != "weight")
    x, grad = torch.randn(3, 256, 70).transpose(1, 2), torch.randn(3, 70, 700)
    x.requires_grad_(frozen != "x")
    found = _grads(OneDNNLinear(plain), x, grad)
    precise = x.detach().double().requires_grad_(frozen != "x")
    expected = _grads(copy.deepcopy(plain).double(), precise, grad.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()  # a few ulp of fp32
    weight = plain.weight.detach().requires_grad_(frozen != "weight")
    torch.library.opcheck(onednn_linear, (x.detach(), weight, None))


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 64), (torch.float64, 64), (torch.float32, 4)])
def test_other_dtypes_and_small_products_are_torch_s_bits(dtype: torch.dtype, rows: int) -> None:
    plain = nn.Linear(128, 256, dtype=dtype)
    x = torch.randn(rows, 128).to(dtype)
    assert torch.equal(OneDNNLinear(plain)(x), plain(x))


def test_only_plain_layers_are_replaced() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"plain": nn.Linear(4, 4), "other": Other(4, 4), "list": nn.Sequential(nn.Linear(4, 4))}
    )
    before = dict(model.named_parameters())
    replace_linears(model)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert sorted(kinds, key=str) == sorted([OneDNNLinear, Other, OneDNNLinear], key=str)
    assert {name: id(it) for name, it in before.items()} == {
        name: id(it) for name, it in model.named_parameters()
    }


@pytest.mark.parametrize("trained", [True, False])
def test_an_output_head_uses_it(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = OutputHead(resolve("llama3", "debugmodel", vocab_size=512), loss_chunk_tokens=40)
    assert plain.weight is not None
    plain.weight.requires_grad_(trained)
    fast = copy.deepcopy(plain)
    replace_linears(nn.ModuleDict({"output": fast}))
    assert fast.logits is linear.linear
    calls, inner = [], linear.onednn_linear
    monkeypatch.setattr(linear, "onednn_linear", lambda *tensors: calls.append(1) or inner(*tensors))
    found = []
    for head in (fast, plain):
        h = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = head(h, torch.arange(80).view(2, 40))
        wanted = [it for it in (h, head.weight) if it.requires_grad]
        found.append([loss, *torch.autograd.grad(loss, wanted)])
        # Two chunks: logits and both gradients, or those of the hidden states alone. Recomputed if trained.
        assert len(calls) == (8 if trained and not linear._is_zen_4() else 6 if trained else 4)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()  # a few ulp of fp32


def test_checkpointing_saves_them_as_it_does_torch_s() -> None:
    for width, saved in ((16, True), (64, False)):
        choice = policy(
            "op", None, torch.ops.toolkit.onednn_linear.default, torch.empty(8, 32), torch.empty(width, 32)
        )
        assert ("MUST_SAVE" in str(choice)) is saved


TABLES = {
    "plain": {},
    "op": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    "full": {"activation_checkpoint": {"mode": "full"}},
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "lora": {"finetune": {"adapter": "lora", "lora": {"rank": 2}}},
    "tp": {"parallelism": {"tensor_parallel_degree": 2}},
    "zero bubble": {
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "InterleavedZeroBubble"}
    },
}


def _train(folder: str) -> dict[str, dict[bool, tuple[list[float], bool]]]:
    """Return the losses of three steps, and whether a layer was replaced, by table and by oneDNN's use."""
    found: dict[str, dict[bool, tuple[list[float], bool]]] = {}
    for name, tables in TABLES.items():
        for fast in (True, False):
            build.is_faster = lambda fast=fast: fast  # type: ignore[assignment]
            config = small_config(
                Path(folder, name, str(fast)),
                training={"steps": 3, "mixed_precision_param": "float32"},
                **tables,
            )
            trainer = small_trainer(config)
            replaced = any(
                isinstance(it, OneDNNLinear) for part in trainer.model_parts.models for it in part.modules()
            )
            trainer.train()
            losses = [record["loss"] for record in trainer.history if "loss" in record]
            found.setdefault(name, {})[fast] = losses, replaced
    return found


def test_runs_have_the_losses_of_torch_s_layers(tmp_path: Path) -> None:
    for found in run_world(_train, 2, str(tmp_path), timeout=170):
        for name, by in found.items():
            (fast, replaced), (plain, none) = by[True], by[False]
            assert replaced == (name != "zero bubble") and not none, name
            assert len(fast) == 3 and fast == pytest.approx(plain, rel=1e-5), name  # fp32 in another order
