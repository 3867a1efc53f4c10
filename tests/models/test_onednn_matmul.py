"""oneDNN multiplies fp32 matrices as torch does, and nothing else than them."""

from __future__ import annotations

import copy

import pytest
import torch

from toolkit.models.common import onednn_matmul
from toolkit.models.common.onednn_matmul import multiply_by_onednn

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN"
)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", [(64, 256, 96), (200, 128, 700), (1, 2000, 600), (700, 300, 16)])
def test_products_and_gradients_are_torchs(
    shape: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    m, k, n = shape
    a = torch.randn(k, m).t() if transposed[0] else torch.randn(m, k)
    b = torch.randn(n, k).t() if transposed[1] else torch.randn(k, n)
    a.requires_grad_(), b.requires_grad_()
    weight = torch.randn(m, n)
    library = multiply_by_onednn()
    product = a @ b
    found = [product, *torch.autograd.grad((product * weight).sum(), (a, b))]
    out = torch.mm(a.detach(), b.detach(), out=torch.empty(m, n))
    library._destroy()
    assert torch.equal(out, product)
    expected = [a.double() @ b.double(), weight.double() @ b.double().t(), a.double().t() @ weight.double()]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()  # some ulp of fp32


def test_linear_layers_with_a_bias_and_their_gradients_are_torchs() -> None:
    layer, x = torch.nn.Linear(256, 700), torch.randn(3, 70, 256, requires_grad=True)
    small, update = torch.randn(3, 256), (torch.randn(210, 700), torch.randn(210, 8), torch.randn(8, 700))
    unchanged = layer(small), torch.addmm(*update, alpha=0.5)
    library = multiply_by_onednn()
    product = layer(x)
    grads = torch.autograd.grad(product.square().sum(), (x, layer.weight, layer.bias))
    out = torch.addmm(layer.bias.detach(), x[0].detach(), layer.weight.detach().t(), out=torch.empty(70, 700))
    with torch.profiler.profile() as profile:
        layer(x)
    again = layer(small), torch.addmm(*update, alpha=0.5)
    library._destroy()
    assert torch.equal(out, product[0])  # as compiled code multiplies
    assert "mkldnn::_linear_pointwise" in {event.name for event in profile.events()}
    precise, twin = x.detach().double().requires_grad_(), copy.deepcopy(layer).double()
    expected = twin(precise)
    theirs = torch.autograd.grad(expected.square().sum(), (precise, twin.weight, twin.bias))
    for one, other in zip((product, *grads), (expected, *theirs), strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()  # some ulp of fp32
    assert all(torch.equal(one, other) for one, other in zip(again, unchanged, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32, torch.int64])
def test_other_products_are_the_same_bits(dtype: torch.dtype) -> None:
    side = 20 if dtype == torch.float32 else 128
    a, b = (torch.randn(side, side).mul(9).to(dtype) for _ in range(2))
    expected = a @ b
    library = multiply_by_onednn()
    found, out = a @ b, torch.mm(a, b, out=torch.empty_like(a))
    library._destroy()
    assert torch.equal(found, expected) and torch.equal(out, expected)


def test_products_that_cannot_be_are_refused_as_ever() -> None:
    library = multiply_by_onednn()
    with pytest.raises(RuntimeError, match="cannot be multiplied|same dtype|expected"):
        torch.randn(200, 200) @ torch.randn(300, 200)
    with pytest.raises(RuntimeError, match="same dtype|expected"):
        torch.randn(200, 200) @ torch.randn(200, 200, dtype=torch.float64)
    library._destroy()


@pytest.mark.parametrize(("family", "kept"), [("25", True), ("26", False)])
def test_zen_4_keeps_products_whose_first_factor_is_transposed(
    family: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"vendor_id": ["AuthenticAMD"], "cpu family": [family]}
    monkeypatch.setattr(onednn_matmul, "processor", lambda: said)
    onednn_matmul._has_half_units.cache_clear()
    a = torch.randn(300, 200)
    assert onednn_matmul._takes(a, a.t()) and onednn_matmul._takes(a, a.t().contiguous())
    assert onednn_matmul._takes(a.t(), a) is not kept
    onednn_matmul._has_half_units.cache_clear()


def test_it_ends_with_what_is_kept() -> None:
    a = torch.randn(300, 300)
    before = a @ a
    library = multiply_by_onednn()
    assert onednn_matmul._takes(a, a)
    del library
    assert torch.equal(a @ a, before)


def test_one_that_begins_before_another_ends_goes_on_without_it() -> None:
    a, b = torch.randn(300, 300), torch.randn(20, 20)
    before = b @ b
    first = multiply_by_onednn()
    second = multiply_by_onednn()
    del first
    assert torch.equal(b @ b, before)  # too few for oneDNN: torch's own kernel is asked
    torch.testing.assert_close(a @ a, (a.double() @ a.double()).float(), rtol=0, atol=1e-3)
    del second
    assert torch.equal(b @ b, before)
