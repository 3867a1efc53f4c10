"""Cross-entropy in at least fp32, and in chunks so that the logits of all tokens never exist at once.

Logits are the largest tensor of a training step: of 8,192 tokens and a vocabulary of 128,256 it
would be 4 GiB in fp32. Each
chunk keeps only its hidden states and computes its logits again in backward: one more matmul of the
head, and memory that does not grow with the sequence. Where the head is frozen, nothing is computed again:
the gradient of the hidden states takes the place of the logits as soon as these are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolkit.fused import Fused

IGNORED_LABEL = -100


def token_losses(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """−log softmax(logits)[label] of each token, 0 of a label of −100: (T,), of at least fp32 (fp64 stays
    fp64)."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="none")


def linear_losses(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """:func:`token_losses` of the logits h Wᵀ (T, V), which are kept once, in their own precision.

    The gradient of the logits is written over them in forward, piece by piece in at least fp32; of a frozen
    weight even that is turned into the gradient of ``h_TD`` at once, and nothing of size V is kept.
    """
    if torch.is_grad_enabled() and h_TD.requires_grad and not weight_VD.requires_grad:
        return _FrozenHeadLosses.apply(h_TD, weight_VD, labels_T)
    # Apart from the product: where a backward is split, torch 2.11 fails in functions of parameters.
    return _LossesOverLogits.apply(F.linear(h_TD, weight_VD), labels_T)[0]


class _FrozenHeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = F.linear(h_TD, weight_VD)
        losses_T = _losses_over_logits(logits_TV, labels_T)
        ctx.save_for_backward(logits_TV @ weight_VD)
        return losses_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        [of_h_TD] = ctx.saved_tensors
        return _scaled(of_h_TD, grad_T), None, None


class _LossesOverLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(logits_TV)
        losses_T = _losses_over_logits(logits_TV, labels_T)
        ctx.save_for_backward(logits_TV)
        return losses_T, logits_TV

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: None) -> tuple[Tensor, None]:
        [of_logits_TV] = ctx.saved_tensors
        return _scaled(of_logits_TV, grad_T), None


PIECE = {"cuda": 1 << 27}
"""Logits that are in fp32 at once; elsewhere 1 << 17 a thread, which with their copies fit into the cache
of its core."""


def _pieces(x: Tensor) -> Iterator[slice]:
    """Some of the rows of ``x`` after the other."""
    rows = max(1, PIECE.get(x.device.type, torch.get_num_threads() << 17) // x.shape[1])
    return (slice(first, first + rows) for first in range(0, max(1, len(x)), rows))


def _scaled(x: Tensor, by_T: Tensor) -> Tensor:
    """Each row of ``x``, which may be overwritten, times a number, multiplied in the number's precision."""
    if by_T.numel() and by_T.stride(0) == 0 and x.device.type not in PIECE:
        return x.mul_(by_T[0])  # the gradient of a sum; a CPU rounds this product once, in one pass
    if _times.takes(x):
        return _times(x, by_T)
    out = torch.empty_like(x)
    for piece in _pieces(x):
        out[piece] = x[piece].to(by_T.dtype) * by_T[piece, None]
    return out


_times = Fused("loss", lambda x, by_T: (x.to(by_T.dtype) * by_T[:, None]).to(x.dtype))


def _losses_over_logits(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """:func:`token_losses`, of whose sum the logits become the gradient."""
    if _whole_over_logits.takes(logits_TV):
        return _whole_over_logits(logits_TV, labels_T)
    return torch.cat([_piece_over_logits(logits_TV[it], labels_T[it]) for it in _pieces(logits_TV)])


def _piece_over_logits(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counted_T1 = (labels_T != IGNORED_LABEL)[:, None]
    index_T1 = labels_T[:, None] * counted_T1
    precise_TV = precise_TV.sub_(precise_TV.amax(-1, keepdim=True))
    picked_T1 = precise_TV.gather(1, index_T1)
    sums_T1 = precise_TV.exp_().sum(-1, keepdim=True)
    losses_T1 = torch.where(counted_T1, sums_T1.log() - picked_T1, 0)
    precise_TV.mul_(counted_T1 / sums_T1)
    precise_TV.scatter_(1, index_T1, precise_TV.gather(1, index_T1) - counted_T1.to(precise_TV.dtype))
    logits_TV.copy_(precise_TV)
    return losses_T1[:, 0]


def _one_pass_over_logits(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """:func:`_piece_over_logits`, which needs no memory between the logits and their gradient where it is
    fused: the label's entry is found by comparison, where a scatter would need the others stored."""
    precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counted_T1 = (labels_T != IGNORED_LABEL)[:, None]
    shifted_TV = precise_TV - precise_TV.amax(-1, keepdim=True)
    sums_T1 = shifted_TV.exp().sum(-1, keepdim=True)
    picked_T1 = shifted_TV.gather(1, labels_T[:, None] * counted_T1)
    losses_T1 = torch.where(counted_T1, sums_T1.log() - picked_T1, 0)
    is_label_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == labels_T[:, None]
    logits_TV.copy_(shifted_TV.exp() * (counted_T1 / sums_T1) - is_label_TV.to(precise_TV.dtype))
    return losses_T1[:, 0]


_whole_over_logits = Fused("loss", _one_pass_over_logits)


def chunked_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int,
    again: bool = True,
) -> Tensor:
    """``loss(hidden, weight, labels)`` of each token (T,), in chunks of at most ``chunk_tokens`` tokens.

    A single chunk (also ``chunk_tokens=0``) is computed directly, without the second forward, and so are all
    unless ``again``, where the loss keeps nothing of the size of logits.
    """
    if chunk_tokens <= 0 or len(labels_T) <= chunk_tokens:
        return loss(hidden_TD, weight_VD, labels_T)
    pieces = zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
    if not again:
        return torch.cat([loss(hidden, weight_VD, labels) for hidden, labels in pieces])
    losses = [
        # Nothing in the head draws random numbers, and saving their state would wait for the device.
        checkpoint(loss, hidden, weight_VD, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in pieces
    ]
    return torch.cat(losses)
