"""Expert parallelism: each rank of an ep group has some experts of each layer, complete unless tensor
parallelism splits their width.

Every rank routes its own tokens and sends each row to the rank of its expert in one all-to-all; another
all-to-all returns the results (GShard, arXiv:2006.16668). Split sizes depend on the routing: ranks first
exchange their counts, which the host reads, the only synchronization of the layer. Hidden states that tensor
parallelism splits along the sequence are not gathered: its ranks send their own tokens. If tensor parallelism
also splits experts, hidden states are gathered, each rank sends all rows to the rank with the same shard of
width, and the summed outputs of the shards are reduce-scattered.

FSDP shards a rank's experts over the ranks with the same experts, which form a separate mesh.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from toolkit.distributed import collectives
from toolkit.hardware import is_simulated, simulated_expert_load
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import Compute, Experts, Permute, inverse
from toolkit.parallel.tensor_parallel import COLUMN, distribute_parameters


def apply_expert_parallel(model: Decoder, mesh: DeviceMesh, *, split_width: bool) -> None:
    """Shard the experts of ``model``, on the meta device, over ``mesh``, in place. If ``split_width``, tensor
    parallelism shards them.

    Raises:
        ValueError: the number of experts is not divisible by the mesh size.
    """
    dispatch = partial(exchange_rows, group=mesh.get_group())
    for module in model.modules():
        if isinstance(module, Experts):
            names = [name for name, _ in module.named_parameters(recurse=False)]
            if not split_width:
                distribute_parameters(module, mesh, **dict.fromkeys(names, COLUMN))
            module.dispatch = dispatch


def exchange_rows(rows_MD: Tensor, counts_E: Tensor, compute: Compute, *, group: dist.ProcessGroup) -> Tensor:
    """Compute rows (M, D), sorted by expert, on the ranks of their experts; ``counts_E`` are the numbers of
    rows per expert. Returns the results in the same order."""
    ranks = group.size()
    counts_RE = counts_E.view(ranks, -1)  # of each rank's experts
    name = group.group_name
    with torch.no_grad():
        one = [1] * ranks
        received_RE = collectives.wait(collectives.start_all_to_all(counts_RE, one, one, name))
    sent, received = _row_counts(counts_RE, received_RE, len(rows_MD))
    arrived_ND = _Exchange.apply(rows_MD, received, sent, name)
    # Rows arrive by rank, and in each by expert; they are computed by expert.
    order_N = _by_expert(received_RE, len(arrived_ND))
    place_N = inverse(order_N)
    computed_ND = compute(Permute.apply(arrived_ND, order_N, place_N), received_RE.sum(0))
    return _Exchange.apply(Permute.apply(computed_ND, place_N, order_N), sent, received, name)


def _row_counts(sent_RE: Tensor, received_RE: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows to send to and receive from each rank; in a simulation, all are equal."""
    if is_simulated():
        ranks = len(sent_RE)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return sizes, [round(size * simulated_expert_load()) for size in sizes]
    sent, received = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
    return sent, received


def _by_expert(received_RE: Tensor, rows: int) -> Tensor:
    """Return the permutation from rows sorted by rank and expert to rows sorted by expert and rank."""
    ranks, experts = received_RE.shape
    expert_of_group = torch.arange(experts, device=received_RE.device).repeat(ranks)
    expert_N = torch.repeat_interleave(expert_of_group, received_RE.flatten(), output_size=rows)
    return expert_N.argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return collectives.wait(collectives.start_all_to_all(x.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = collectives.start_all_to_all(grad.contiguous(), ctx.sent, ctx.received, ctx.group)
        return collectives.wait(back), None, None, None
