"""The exchange of rows between the ranks of experts beside one process that has them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import in_layout, run_world
from toolkit.models.common.grouped_linear import grouped_linear
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_are_those_of_one_process(ranks: int) -> None:
    results = run_world(_exchanged, ranks)
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
