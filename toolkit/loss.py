"""Cross-entropy in at least fp32, computed in chunks so that the logits of all tokens never exist at once.

Logits are the largest tensor of a training step: 4 GiB in fp32 for 8,192 tokens and a vocabulary of 128,256.
Each chunk saves only its hidden states and recomputes its logits in backward, at the cost of one more matmul
of the head; logits memory is independent of the sequence length. A frozen head needs no recomputation:
forward computes the gradient of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toolkit.fused import Fused
from toolkit.hardware import device_type

IGNORED_LABEL = -100
Linear = Callable[[Tensor, Tensor], Tensor]
"""Function like F.linear, of x (T, K) and a weight (N, K)."""


def token_losses(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return −log softmax(logits)[label] of each token, (T,), in at least fp32 (fp64 stays fp64); 0 where the
    label is −100."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="none")


def linear_losses(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, linear: Linear = F.linear) -> Tensor:
    """Return :func:`token_losses` of the logits h Wᵀ (T, V), which are stored once, in the dtype of ``h_TD``.

    Forward overwrites the logits with their gradient, chunk by chunk in at least fp32. If the weight is
    frozen, forward also computes the gradient of ``h_TD``, and no tensor of size V is saved.
    """
    if torch.is_grad_enabled() and h_TD.requires_grad and not weight_VD.requires_grad:
        return _FrozenHeadLosses.apply(h_TD, weight_VD, labels_T, linear)
    # Outside the matmul: with a split backward, torch 2.11 fails in autograd functions of parameters.
    return _LossesInPlace.apply(linear(h_TD, weight_VD), labels_T)[0]


class _FrozenHeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, linear: Linear) -> Tensor:
        logits_TV = linear(h_TD, weight_VD)
        losses_T = _losses_in_place(logits_TV, labels_T)
        ctx.save_for_backward(linear(logits_TV, weight_VD.T))
        return losses_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        [grad_h_TD] = ctx.saved_tensors
        return _scale_rows(grad_h_TD, grad_T), None, None, None


class _LossesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(logits_TV)
        losses_T = _losses_in_place(logits_TV, labels_T)
        ctx.save_for_backward(logits_TV)
        return losses_T, logits_TV

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, _: None) -> tuple[Tensor, None]:
        [grad_logits_TV] = ctx.saved_tensors
        return _scale_rows(grad_logits_TV, grad_T), None


CHUNK_LOGITS = {"cuda": 1 << 27}
"""Number of logits in fp32 at a time; other devices use 1 << 17 per thread, so that they and their copies fit
in a core's cache."""


def _row_chunks(x: Tensor) -> Iterator[slice]:
    """Split the rows of ``x`` into chunks of bounded size."""
    rows = max(1, CHUNK_LOGITS.get(device_type(x.device.type), torch.get_num_threads() << 17) // x.shape[1])
    return (slice(first, first + rows) for first in range(0, max(1, len(x)), rows))


def _scale_rows(x: Tensor, by_T: Tensor) -> Tensor:
    """Scale each row of ``x`` in place, in the dtype of ``by_T``, and return it."""
    if by_T.numel() and by_T.stride(0) == 0 and device_type(x.device.type) not in CHUNK_LOGITS:
        return x.mul_(by_T[0])  # the gradient of a sum; a CPU multiplies and rounds in one pass
    if _fused_scale_rows.applies_to(x):
        return _fused_scale_rows(x, by_T)
    for chunk in _row_chunks(x):
        x[chunk] = x[chunk].to(by_T.dtype) * by_T[chunk, None]
    return x


_fused_scale_rows = Fused("loss", lambda x, by_T: x.copy_(x.to(by_T.dtype) * by_T[:, None]))


def _losses_in_place(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return :func:`token_losses` and overwrite the logits with the gradient of the sum."""
    if _fused_losses_in_place.applies_to(logits_TV):
        return _fused_losses_in_place(logits_TV, labels_T)
    return torch.cat([_chunk_losses_in_place(logits_TV[it], labels_T[it]) for it in _row_chunks(logits_TV)])


def _chunk_losses_in_place(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
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


def _one_pass_losses_in_place(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Variant of :func:`_chunk_losses_in_place` for fusion: it finds the label's entry by comparison, because
    a scatter would store the intermediate result."""
    precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counted_T1 = (labels_T != IGNORED_LABEL)[:, None]
    shifted_TV = precise_TV - precise_TV.amax(-1, keepdim=True)
    sums_T1 = shifted_TV.exp().sum(-1, keepdim=True)
    picked_T1 = shifted_TV.gather(1, labels_T[:, None] * counted_T1)
    losses_T1 = torch.where(counted_T1, sums_T1.log() - picked_T1, 0)
    is_label_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == labels_T[:, None]
    logits_TV.copy_(shifted_TV.exp() * (counted_T1 / sums_T1) - is_label_TV.to(precise_TV.dtype))
    return losses_T1[:, 0]


_fused_losses_in_place = Fused("loss", _one_pass_losses_in_place)


def chunked_loss(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int,
    recompute: bool = True,
) -> Tensor:
    """Return ``loss(hidden, weight, labels)`` of each token (T,), in chunks of at most ``chunk_tokens``
    tokens.

    Backward recomputes each chunk, unless there is only one (``chunk_tokens=0`` forces one) or ``recompute``
    is False, for a loss that saves no tensor of the size of the logits.
    """
    if chunk_tokens <= 0 or len(labels_T) <= chunk_tokens:
        return loss(hidden_TD, weight_VD, labels_T)
    chunks = zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
    if not recompute:
        return torch.cat([loss(hidden, weight_VD, labels) for hidden, labels in chunks])
    losses = [
        # The head uses no random numbers, and saving the generator's state would synchronize the device.
        checkpoint(loss, hidden, weight_VD, labels, use_reentrant=False, preserve_rng_state=False)
        for hidden, labels in chunks
    ]
    return torch.cat(losses)
