"""The training loss of a run that names another than the plain cross-entropy, or adds terms to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.config import Config
from toolkit.config.schema import added
from toolkit.loss import IGNORED_LABEL

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Logits (T, V) and labels (T,) to the losses of tokens (T,), 0 where the label is −100."""


def training_losses(config: Config) -> TokenLosses | None:
    """The loss of ``config``; None for the cross-entropy alone."""
    options = config.loss
    if options.name != "cross_entropy":
        losses: TokenLosses = added("loss.name")[options.name](config)
        return losses
    if not options.label_smoothing and not options.z_loss:
        return None
    return lambda logits_TV, labels_T: regularized_losses(
        logits_TV, labels_T, smoothing=options.label_smoothing, z_loss=options.z_loss
    )


def regularized_losses(logits_TV: Tensor, labels_T: Tensor, *, smoothing: float, z_loss: float) -> Tensor:
    """The cross-entropy with a part ``smoothing`` of the probability spread evenly over the vocabulary, as in
    torch's (Szegedy et al. 2015, arXiv:1512.00567), plus ``z_loss`` · log² Z, Z being the softmax's
    denominator (Chowdhery et al. 2022, arXiv:2204.02311)."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counted_T = labels_T != IGNORED_LABEL
    log_z_T = logits_TV.logsumexp(-1)
    picked_T = logits_TV.gather(1, (labels_T * counted_T)[:, None])[:, 0]
    expected_T = (1 - smoothing) * picked_T
    if smoothing:
        expected_T = expected_T + smoothing * logits_TV.mean(-1)
    return (log_z_T - expected_T + z_loss * log_z_T.square()) * counted_T
