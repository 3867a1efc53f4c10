import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world


def _sum_of_ranks(offset: float) -> float:
    value = torch.tensor(float(dist.get_rank()) + offset)
    dist.all_reduce(value)
    return value.item()


def _one_rank_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def test_world_returns_every_ranks_result():
    assert run_world(_sum_of_ranks, 2, 1.0) == [3.0, 3.0]


def test_world_raises_the_failing_ranks_error():
    with pytest.raises(RuntimeError, match="failed"):
        run_world(_one_rank_fails, 2, timeout=30)
