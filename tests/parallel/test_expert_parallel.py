"""The exchange of rows between the ranks of experts beside one process that has them all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import in_layout, run_world
from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.models.small_llama import small
from toolkit.models.common.args import MoEArgs
from toolkit.models.common.grouped_linear import grouped_linear
from toolkit.models.common.moe import MoE
from toolkit.parallel.expert_parallel import exchange_rows

EXPERTS, DIM = 4, 3


def _routings(ranks: int) -> dict[str, list[list[int]]]:
    """Rows of each expert, for each rank."""
    experts = range(EXPERTS)
    last = EXPERTS - EXPERTS // ranks  # the first expert of the last rank
    return {
        "uneven": [[(3 * rank + 2 * expert) % 5 for expert in experts] for rank in range(ranks)],
        "all rows to the last rank": [
            [(rank + 1) * (expert >= last) for expert in experts] for rank in range(ranks)
        ],
        "all rows to one expert": [[0, 4, 0, 0]] * ranks,
        "the first rank receives none": [
            [2 * (expert >= EXPERTS // ranks) for expert in experts] for _ in range(ranks)
        ],
        "the first rank has none": [
            [2 * (rank > 0), 1 * (rank > 0), 0, 3 * (rank > 0)] for rank in range(ranks)
        ],
        "no rank has any": [[0] * EXPERTS] * ranks,
    }


def _weights() -> Tensor:
    return torch.randn(EXPERTS, DIM, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _rows(rank: int, counts: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(sum(counts), DIM, generator=generator, dtype=torch.float64)


def _apply(weight: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """An expert's matmul, and a function that is not linear, whose backward needs the right rows again."""
    return grouped_linear(rows, weight, counts.cumsum(0, dtype=torch.int32)).tanh()


def _exchanged() -> dict[str, tuple[Tensor, Tensor, Tensor, list[int]]]:
    """This rank's results, the gradients of its rows and experts, and the rows that its experts computed."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found = {}
    for name, counts in _routings(group.size()).items():
        with in_layout(name):
            rows = _rows(rank, counts[rank]).requires_grad_()
            weight = _weights().chunk(group.size())[rank].clone().requires_grad_()
            computed = []

            def compute(rows_MD: Tensor, counts_E: Tensor) -> Tensor:
                computed.extend(counts_E.tolist())  # noqa: B023 (called in this iteration alone)
                return _apply(weight, rows_MD, counts_E)  # noqa: B023

            out = exchange_rows(rows, torch.tensor(counts[rank]), compute, group=group)
            (out * (rank + 1)).sum().backward()
            assert rows.grad is not None and weight.grad is not None
            found[name] = (out.detach(), rows.grad, weight.grad, computed)
    return found


ARGS = replace(small("experts", dim=8, n_heads=2, head_dim=4), moe=MoEArgs(EXPERTS, 2, 6, expert_bias=True))
LAYERS = {  # choices per token, tokens of each rank, and the biases of experts
    "all tokens to one expert of the last rank": (1, 5, [0, 0, 0, 9]),
    "no expert of the first rank is chosen": (2, 5, [0, 0, 9, 9]),
    "one token": (1, 1, [0, 0, 0, 0]),
    "all experts": (EXPERTS, 3, [0, 0, 0, 0]),
    "one token to all experts": (EXPERTS, 1, [0, 0, 0, 0]),
}


def _layer(name: str) -> MoE:
    assert ARGS.moe is not None
    top_k, _, bias = LAYERS[name]
    moe = MoE(replace(ARGS, moe=replace(ARGS.moe, top_k=top_k))).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in moe.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    assert moe.expert_bias is not None
    moe.expert_bias.copy_(torch.tensor(bias))
    return moe


def _tokens(name: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(1, LAYERS[name][1], ARGS.dim, generator=generator, dtype=torch.float64)


def _of_layers() -> dict[str, dict[str, Tensor]]:
    """The output of this rank's tokens, and gradients, of layers whose experts are divided over ranks."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found = {}
    for name in LAYERS:
        with in_layout(name):
            moe, x = _layer(name), _tokens(name, rank).requires_grad_()
            for weight in ("w1", "w2", "w3"):
                own = getattr(moe.experts, weight).detach().chunk(group.size())[rank]
                setattr(moe.experts, weight, nn.Parameter(own.clone()))
            moe.experts.dispatch = partial(exchange_rows, group=group)
            found[name] = _found(moe, x, (rank + 1) * moe(x).hidden)
    return found


def _found(moe: MoE, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    out.square().sum().backward()
    gradients = {name: it.grad for name, it in [("x", x), *moe.named_parameters()]}
    return {"out": out.detach(), **{name: it for name, it in gradients.items() if it is not None}}


def _everything() -> tuple[dict[str, tuple[Tensor, Tensor, Tensor, list[int]]], dict[str, dict[str, Tensor]]]:
    return _exchanged(), _of_layers()


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list:
    """Findings of each rank of a world."""
    return run_world(_everything, request.param)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_results_and_gradients_of_one_process(results: list, name: str) -> None:
    ranks, moe = range(len(results)), _layer(name)
    xs = [_tokens(name, rank).requires_grad_() for rank in ranks]
    outs = [(rank + 1) * moe(x).hidden for rank, x in zip(ranks, xs, strict=True)]
    torch.stack([out.square().sum() for out in outs]).sum().backward()
    for rank, (_, found) in enumerate(results):
        # Sums of a few rows in another order.
        torch.testing.assert_close(found[name]["out"], outs[rank].detach(), atol=1e-13, rtol=1e-12)
        torch.testing.assert_close(found[name]["x"], xs[rank].grad, atol=1e-12, rtol=1e-12)
    of_ranks = [found[name] for _, found in results]
    for weight in ("w1", "w2", "w3"):
        found = torch.cat([it[f"experts.{weight}"] for it in of_ranks])
        torch.testing.assert_close(found, getattr(moe.experts, weight).grad, atol=1e-12, rtol=1e-12)
    router = torch.stack([it["router.gate.weight"] for it in of_ranks]).sum(0)
    torch.testing.assert_close(router, moe.router.gate.weight.grad, atol=1e-12, rtol=1e-12)


def test_results_and_gradients_are_those_of_one_process(results: list) -> None:
    ranks, results = len(results), [exchanged for exchanged, _ in results]
    for name, counts in _routings(ranks).items():
        weight = _weights().requires_grad_()
        for rank, result in enumerate(results):
            rows = _rows(rank, counts[rank]).requires_grad_()
            out = _apply(weight, rows, torch.tensor(counts[rank]))
            (out * (rank + 1)).sum().backward()
            # A row is computed alone, so only a matmul of another number of rows may round otherwise.
            torch.testing.assert_close(result[name][:2], (out.detach(), rows.grad), atol=1e-14, rtol=1e-14)
        gradients = torch.cat([result[name][2] for result in results])
        # Sums of up to 16 rows in another order.
        torch.testing.assert_close(gradients, weight.grad, atol=1e-13, rtol=1e-13)
        computed = [number for result in results for number in result[name][3]]
        assert computed == torch.tensor(counts).sum(0).tolist(), name
