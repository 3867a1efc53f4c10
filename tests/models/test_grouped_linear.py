"""Matmuls of experts: values and gradients beside a plain loop, whatever the sizes of the groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models.common.grouped_linear import grouped_linear

SIZES = {
    "uneven": (2, 3, 1),
    "an empty group between others": (2, 0, 4),
    "the first and the last are empty": (0, 5, 0),
    "all rows in the first": (5, 0, 0),
    "all rows in the last": (0, 0, 5),
    "no rows": (0, 0, 0),
}
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def _inputs(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float64, *, n: int = 3, k: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (M, K), weights (E, N, K) and ends of groups."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), k, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(sizes), n, k, generator=generator, dtype=torch.float64)
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ends


def _loop(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([rows @ weight[expert].T for expert, rows in enumerate(x.split(sizes))])


@every_size
def test_gradients_are_those_of_differences(sizes: tuple[int, ...]) -> None:
    x, weight, ends = _inputs(sizes)
    assert torch.autograd.gradcheck(lambda *it: grouped_linear(*it, ends), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_size
def test_values_and_gradients_are_those_of_a_loop(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, ends = _inputs(sizes, dtype)
    found, expected = grouped_linear(x, weight, ends), _loop(x, weight, sizes)
    # The same matmuls, whose layouts may differ: some roundings of values of order 1, each of half an eps.
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    # A gradient that is not contiguous, as that of a transposed result is.
    upstream = torch.linspace(-1, 1, found.numel(), dtype=dtype).view(3, -1).T
    ours = torch.autograd.grad(found, (x, weight), upstream)
    theirs = torch.autograd.grad(expected, (x, weight), upstream)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("n", "k"), [(8, 16), (12, 16), (8, 4)], ids=["aligned", "odd n", "odd k"])
@every_size
def test_what_runs_on_cuda_gives_the_same(
    sizes: tuple[int, ...], n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run it on CPU, where torch has a plain version of grouped_mm with the same rules for widths."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, weight, ends = _inputs(sizes, torch.bfloat16, n=n, k=k)
    found, expected = grouped_linear(x, weight, ends), _loop(x, weight, sizes)
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    upstream = torch.linspace(-1, 1, found.numel(), dtype=torch.bfloat16).view_as(found)
    ours = torch.autograd.grad(found, (x, weight), upstream)
    theirs = torch.autograd.grad(expected, (x, weight), upstream)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    x, weight, ends = _inputs((0, 3, 0, 2))
    grouped_linear(x, weight, ends).sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten(1).any(1).tolist() == [False, True, False, True]


class _Operators(TorchDispatchMode):
    """Names of the toolkit's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "toolkit":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "computed"), [("weight", ["grouped_linear"]), ("x", ["grouped_linear_weight_grad"])]
)
def test_backward_computes_only_gradients_that_are_needed(frozen: str, computed: list[str]) -> None:
    """The weights' gradient is as large as all experts, which adapters leave frozen."""
    x, weight, ends = _inputs((2, 0, 4))
    (weight if frozen == "weight" else x).requires_grad_(False)
    out = grouped_linear(x, weight, ends)
    with _Operators() as operators:
        out.sum().backward()
    assert operators.names == computed
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_compiled_graph_has_the_same_values_and_gradients(dtype: torch.dtype) -> None:
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    for sizes in ((2, 0, 4), (0, 5, 1)):  # of one graph, since only the ends differ
        x, weight, ends = _inputs(sizes, dtype)
        results = [function(x, weight, ends) for function in (compiled, grouped_linear)]
        gradients = [torch.autograd.grad(it.square().sum(), (x, weight)) for it in results]
        assert torch.equal(*results)
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
