"""RMSNorm in pieces beside torch's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.cpu import rms_norm
from toolkit.models.common.rms_norm import RMSNorm

EPS = 1e-5


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Parameter, Tensor]:
    """x, its weight and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), nn.Parameter(weight), grad


def with_gradients(norm: nn.RMSNorm, x: Tensor, weight: nn.Parameter, grad: Tensor) -> list[Tensor]:
    norm.weight = weight
    out = norm(x)
    return [out.detach(), *torch.autograd.grad(out, [x, weight], grad)]


@pytest.fixture(autouse=True)
def pieces_before_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not taken there for the sake of pipelines alone."""
    monkeypatch.setattr(rms_norm, "_FUNCTIONS_OF_PARAMETERS", True)


@pytest.mark.parametrize("shape", [(3, 700, 48), (2, 300, 4, 16), (40_000, 1)])
def test_pieces_are_what_torch_computes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_PIECE", 1 << 10)  # the last piece is shorter than others
    given = inputs(*shape)
    lengths, pieces = [], rms_norm._pieces

    def counted(*tensors: Tensor) -> Any:
        found = list(pieces(*tensors))
        lengths.append(len(found))
        return found

    monkeypatch.setattr(rms_norm, "_pieces", counted)
    found = with_gradients(RMSNorm(shape[-1], eps=EPS), *given)
    assert len(lengths) == 2 and min(lengths) > 2, "forward and backward are not in pieces"
    expected = with_gradients(nn.RMSNorm(shape[-1], eps=EPS), *given)
    for mine, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pieces_round_no_more_than_torch(dtype: torch.dtype) -> None:
    given = inputs(600, 96, dtype=dtype)
    x, weight, grad = (tensor.detach().double() for tensor in given)
    truth = with_gradients(nn.RMSNorm(96, eps=EPS), x.requires_grad_(), nn.Parameter(weight), grad)
    distances = [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        for found in (with_gradients(norm(96, eps=EPS), *given) for norm in (RMSNorm, nn.RMSNorm))
    ]
    # Both compute in fp32 and round the results once: sums in another order are all that differs.
    assert all(mine <= 1.05 * torchs + 1e-7 for mine, torchs in zip(*distances, strict=True)), distances


def test_a_transposed_input_is_read_as_it_lies() -> None:
    x, weight, grad = inputs(500, 3, 64)
    turned = x.detach().transpose(0, 1).requires_grad_()
    found = with_gradients(RMSNorm(64, eps=EPS), turned, weight, grad.transpose(0, 1))
    expected = with_gradients(nn.RMSNorm(64, eps=EPS), x, weight, grad)
    for mine, torchs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, torchs.transpose(0, 1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-11, atol=1e-11)


def test_the_input_and_a_number_a_token_are_kept_for_backward() -> None:
    x, weight, _ = inputs(600, 96, dtype=torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        RMSNorm(96, eps=EPS)(x)  # a weight of its own, in fp32
    assert sorted(tensor.numel() for tensor in kept) == [96, 600, x.numel()]
    assert x.data_ptr() in [tensor.data_ptr() for tensor in kept]


def test_few_numbers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "rms_norm", None)
    x, weight, _ = inputs(8, 96)
    norm = RMSNorm(96, eps=EPS)
    norm.weight = weight
    assert torch.equal(norm(x), F.rms_norm(x, (96,), weight, EPS))


def test_the_compiler_gets_operators_that_it_can_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "rms_norm", None)
    given = inputs(600, 96)
    compiled = torch.compile(RMSNorm(96, eps=EPS).double(), backend="aot_eager", fullgraph=True)
    expected = F.rms_norm(given[0], (96,), torch.ones(96, dtype=torch.float64), EPS)
    torch.testing.assert_close(compiled(given[0]), expected, rtol=1e-12, atol=1e-12)
