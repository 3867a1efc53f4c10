"""Cross-entropy in at least fp32, and in chunks so that the logits of all tokens never exist at once.

Logits are the largest tensor of a training step: of 8,192 tokens and a vocabulary of 128,256 it
would be 4 GiB in fp32. Each
chunk keeps only its hidden states and computes its logits again in backward: one more matmul of the
head, and memory that does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED_LABEL = -100


def token_losses(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """−log softmax(logits)[label] of each token, 0 of a label of −100: (T,), of at least fp32 (fp64 stays
    fp64)."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="none")


def chunked_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int,
) -> Tensor:
    """``loss(hidden, weight, labels)`` of each token (T,), in chunks of at most ``chunk_tokens`` tokens.

    A single chunk (also ``chunk_tokens=0``) is computed directly, without the second forward.
    """
    if chunk_tokens <= 0 or len(labels_T) <= chunk_tokens:
        return loss(hidden_TD, weight_VD, labels_T)
    pieces = zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
    losses = [
        # Nothing in the head draws random numbers, and saving their state would wait for the device.
        checkpoint(loss, hidden, weight_VD, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in pieces
    ]
    return torch.cat(losses)


def vocabulary_parallel_losses(
    logits_TV: Tensor, labels_T: Tensor, *, first: int, group: dist.ProcessGroup
) -> Tensor:
    """:func:`token_losses` of logits of which each rank of ``group`` has a piece of the vocabulary.

    This rank's begins at entry ``first``. The result is the same on every rank; of the gradient each
    gets that of its own logits. Three numbers a token are exchanged in place of V.
    """
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return _VocabularyParallelLosses.apply(logits_TV, labels_T, first, group)


class _VocabularyParallelLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, first: int, group: Any) -> Tensor:
        greatest_T = _all_reduce(logits_TV.amax(-1), "max", group)
        shifted_TV = logits_TV - greatest_T[:, None]
        counted_T = labels_T != IGNORED_LABEL
        index_T = labels_T - first
        mine_T = (index_T >= 0) & (index_T < logits_TV.shape[-1]) & counted_T
        index_T1 = (index_T * mine_T)[:, None]
        picked_T = shifted_TV.gather(1, index_T1)[:, 0] * mine_T
        exponents_TV = shifted_TV.exp_()
        sums_T, picked_T = _all_reduce(torch.stack([exponents_TV.sum(-1), picked_T]), "sum", group).unbind()
        ctx.save_for_backward(exponents_TV.div_(sums_T[:, None]), index_T1, mine_T, counted_T)
        return (sums_T.log() - picked_T) * counted_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, index_T1, mine_T, counted_T = ctx.saved_tensors
        grad_T1 = (counted_T * grad_T)[:, None]
        grad_TV = softmax_TV * grad_T1
        return grad_TV.scatter_add_(1, index_T1, -grad_T1 * mine_T[:, None]), None, None, None


def _all_reduce(x: Tensor, operation: str, group: Any) -> Tensor:
    ops = torch.ops._c10d_functional  # what torch.compile traces
    return ops.wait_tensor(ops.all_reduce(x, operation, group.group_name))
