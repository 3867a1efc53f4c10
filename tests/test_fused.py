"""Parts of a step that are fused on CUDA: their compiled form, here for the CPU, gives what operators give.

A fused kernel rounds once where operators round each result, so that in 16 bits the two differ by roundings
of 2^-9; in fp32 by the order of sums and by fused multiply-adds, some 1e-7.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small_llama import build, small, tokens_and_labels
from toolkit import fused, loss
from toolkit.finetune import nf4
from toolkit.fused import Fused
from toolkit.models.common import rope, swiglu
from toolkit.optim import adamw_8bit

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
"""Each is compiled, for some ten seconds."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Fused]:
    """All parts enabled, and compiled for CPU tensors too; the parts that were called."""
    called = []

    def call(self: Fused, *given: Any) -> Any:
        called.append(self)
        return self.compiled(*given)

    monkeypatch.setattr(Fused, "__call__", call)
    before = fused.enable(["adamw_8bit", "loss", "nf4", "rotary", "swiglu"])
    yield called
    fused.enable(before)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_gradients(dtype: torch.dtype, on_cpu: list[Fused]) -> None:
    gate, up, grad = (_random(6, it, 32, dtype=dtype)[:, 0] for it in (1, 2, 3))
    gate.requires_grad_(), up.requires_grad_()
    exact = torch.autograd.grad(nn.functional.silu(gate) * up, (gate, up), grad)
    out = swiglu.swiglu(gate, up)
    torch.testing.assert_close(out, nn.functional.silu(gate) * up, rtol=ROUNDING[dtype], atol=1e-6)
    found = torch.autograd.grad(out, (gate, up), grad)
    torch.testing.assert_close(found, exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert len(on_cpu) == 2


def test_swiglu_saves_its_arguments_alone() -> None:
    gate, up = (_random(6, it, dtype=torch.float32).requires_grad_() for it in (32, 32))
    before = fused.enable(["swiglu"])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: saved.append(it) or it, lambda it: it):
        swiglu.swiglu(gate, up)
    fused.enable(before)
    assert len(saved) == 2 and {it.data_ptr() for it in saved} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_its_gradient(dtype: torch.dtype) -> None:
    x, grad = (_random(2, 10, it, 32, dtype=dtype)[:, :, :4] for it in (4, 5))
    x.requires_grad_()
    rotations = rope.rope_rotations(small(dim=128, n_heads=4), torch.arange(10), dtype)
    exact, found = rope.rotate(x, rotations), rope._fused_rotate.compiled(x, rotations)
    # Two products and a sum in fp32, then one rounding, in both forms.
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(torch.autograd.grad(found, x, grad), torch.autograd.grad(exact, x, grad))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_its_gradients(
    dtype: torch.dtype, frozen: bool, on_cpu: list[Fused], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = _random(20, 8, dtype=dtype).requires_grad_()
    weight = _random(50, 8, dtype=dtype).requires_grad_(not frozen)
    labels = torch.arange(20) * 2
    labels[::3] = loss.IGNORED_LABEL
    leaves = [it for it in (hidden, weight) if it.requires_grad]
    scale = torch.arange(20.0) / 10

    def gradients() -> tuple[Tensor, ...]:
        losses = loss.linear_losses(hidden, weight, labels)
        return losses.detach(), *torch.autograd.grad((losses * scale).sum(), leaves)

    exact = gradients()
    assert not on_cpu  # logits on a CPU are taken in pieces
    monkeypatch.setattr(Fused, "applies_to", lambda self, x: True)
    # The pieces' softmax and this one are the same sums; gradients are rounded to the precision of logits.
    torch.testing.assert_close(gradients(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert len(on_cpu) == 2


def test_elements_of_nf4_are_the_same_to_the_bit() -> None:
    packed = nf4.quantize(_random(5, 256, dtype=torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        found = nf4._elements.compiled(packed, nf4._pairs_of_levels(packed.device), dtype)
        assert torch.equal(found, nf4.dequantize(packed, dtype))


@pytest.mark.parametrize("shape", [(40, 512), (100,)], ids=str)
def test_adamw_8bit_is_the_same_but_for_rounding(shape: tuple[int, ...], on_cpu: list[Fused]) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    ours, other = (nn.Parameter(_random(*shape, dtype=torch.float32)) for _ in range(2))
    compiled, plain = (adamw_8bit.AdamW8bit([it], **options) for it in (ours, other))
    for step in range(3):
        ours.grad = other.grad = _random(step + 1, *shape, dtype=torch.float32)[step]
        compiled.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adamw_8bit, "_step", adamw_8bit._step_rows)
            plain.step()
    # A moment that lies between two codes may go to either: a code is at most a 26th of its value off, of
    # which an element's update, lr at most, changes by as much. All else is fp32's rounding.
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=options["lr"] / 26)
    assert ((ours - other).abs() > 1e-6).float().mean() < 1e-3
    for name, moment in compiled.state[ours].items():
        expected = plain.state[other][name]
        if name.endswith("_codes"):
            apart = (moment.int() - expected.int()).abs()
            assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3
        else:
            torch.testing.assert_close(moment, expected, rtol=1e-5, atol=1e-8)
    assert len(on_cpu) == 3


def test_nothing_is_compiled_on_other_devices_or_where_it_is_not_enabled() -> None:
    part = Fused("rotary", lambda x: x + 1)
    part.compiled = pytest.fail
    before = fused.enable(["rotary"])
    assert part(torch.zeros(1)) == 1  # on a CPU
    fused.enable([])

    class OnCuda:
        is_cuda = True

        def __add__(self, _: int) -> str:
            return "not fused"

    assert part(OnCuda()) == "not fused"
    fused.enable(["rotary"])
    part.compiled = lambda x: "fused"
    assert part(OnCuda()) == "fused"
    fused.enable(before)


@pytest.mark.parametrize("mode", ["none", "op"])
def test_a_checkpointed_model_trains_alike(mode: str, on_cpu: list[Fused]) -> None:
    from toolkit.config.parallelism import ActivationCheckpoint
    from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint

    def gradients() -> list[Tensor]:
        model = build(small(n_layers=2), torch.float32)
        options = ActivationCheckpoint(mode="selective" if mode == "op" else mode, selective_ac_option="op")
        apply_activation_checkpoint(model.layers, options)
        tokens, labels = tokens_and_labels(2, 40)
        model(tokens, labels=labels).backward()
        return [parameter.grad for parameter in model.parameters()]

    found = gradients()
    assert on_cpu
    fused.enable([])
    # fp32: operators in another order, through two layers.
    torch.testing.assert_close(found, gradients(), rtol=1e-4, atol=1e-5)
