"""Cross-entropy in at least fp32, and in chunks so that the logits of all tokens never exist at once.

Logits are the largest tensor of a training step: of 8,192 tokens and a vocabulary of 128,256 it
would be 4 GiB in fp32. Each
chunk keeps only its hidden states and computes its logits again in backward: one more matmul of the
head, and memory that does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
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
