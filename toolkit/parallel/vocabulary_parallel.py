"""Cross-entropy of logits sharded along the vocabulary over a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.distributed.collectives import all_reduce
from toolkit.loss import IGNORED_LABEL


def vocabulary_parallel_losses(
    logits_TV: Tensor, labels_T: Tensor, *, first: int, group: dist.ProcessGroup
) -> Tensor:
    """Compute :func:`~toolkit.loss.token_losses` of logits sharded over ``group``.

    This rank's shard begins at vocabulary entry ``first``. The result is the same on every rank, and each
    rank gets the gradient of its shard. Three values per token are communicated instead of V.
    """
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return _VocabularyParallelLosses.apply(logits_TV, labels_T, first, group)


class _VocabularyParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, first: int, group: Any) -> Tensor:
        max_T = all_reduce(logits_TV.amax(-1), "max", group.group_name)
        shifted_TV = logits_TV - max_T[:, None]
        counted_T = labels_T != IGNORED_LABEL
        index_T = labels_T - first
        in_shard_T = (index_T >= 0) & (index_T < logits_TV.shape[-1]) & counted_T
        index_T1 = (index_T * in_shard_T)[:, None]
        picked_T = shifted_TV.gather(1, index_T1)[:, 0] * in_shard_T
        exponents_TV = shifted_TV.exp_()
        both = torch.stack([exponents_TV.sum(-1), picked_T])
        sums_T, picked_T = all_reduce(both, "sum", group.group_name).unbind()
        ctx.save_for_backward(exponents_TV.div_(sums_T[:, None]), index_T1, in_shard_T, counted_T)
        return (sums_T.log() - picked_T) * counted_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, index_T1, in_shard_T, counted_T = ctx.saved_tensors
        grad_T1 = (counted_T * grad_T)[:, None]
        grad_TV = softmax_TV * grad_T1
        return grad_TV.scatter_add_(1, index_T1, -grad_T1 * in_shard_T[:, None]), None, None, None
