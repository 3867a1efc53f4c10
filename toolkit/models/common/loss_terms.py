"""Training losses other than plain cross-entropy: registered ones, label smoothing and z-loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.config import Config
from toolkit.config.schema import registry
from toolkit.errors import ConfigError
from toolkit.loss import IGNORED_LABEL

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Function of logits (T, V) and labels (T,) that returns per-token losses (T,), 0 where the label is
−100."""


def training_losses(config: Config) -> TokenLosses | None:
    """Return the loss function of ``config``; None for plain cross-entropy."""
    options = config.loss
    if options.name != "cross_entropy":
        return _with_checks(registry("loss.name")[options.name](config), config)
    if not options.label_smoothing and not options.z_loss:
        return None
    return lambda logits_TV, labels_T: regularized_losses(
        logits_TV, labels_T, smoothing=options.label_smoothing, z_loss=options.z_loss
    )


def _with_checks(losses: TokenLosses, config: Config) -> TokenLosses:
    """Wrap a user's ``losses`` so that any result other than one loss per token raises an error."""
    from toolkit.config.custom_import import component_error

    def wrong(rule: str) -> ConfigError:
        return component_error(config, "loss.name", config.loss.name, losses, rule)

    if not callable(losses):
        raise wrong(f"build returns {losses!r}, not a function of logits and labels")

    def checked(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        losses_T = losses(logits_TV, labels_T)
        if not isinstance(losses_T, Tensor):
            raise wrong(f"returns {losses_T!r}, not a tensor with one loss per token")
        if losses_T.shape != labels_T.shape:
            shapes = f"{tuple(losses_T.shape)} for labels of {tuple(labels_T.shape)}"
            raise wrong(f"returns {shapes}: one loss per token is required")
        if losses_T.dtype not in (torch.float32, torch.float64):
            raise wrong(f"returns {losses_T.dtype}: losses must be at least fp32, as from logits.float()")
        if logits_TV.requires_grad and torch.is_grad_enabled() and not losses_T.requires_grad:
            raise wrong("returns losses without a gradient")
        return losses_T

    return checked


def regularized_losses(logits_TV: Tensor, labels_T: Tensor, *, smoothing: float, z_loss: float) -> Tensor:
    """Return cross-entropy with label smoothing as in torch (Szegedy et al. 2015, arXiv:1512.00567), plus
    ``z_loss`` · log² Z, where Z is the softmax's denominator (Chowdhery et al. 2022, arXiv:2204.02311)."""
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counted_T = labels_T != IGNORED_LABEL
    log_z_T = logits_TV.logsumexp(-1)
    picked_T = logits_TV.gather(1, (labels_T * counted_T)[:, None])[:, 0]
    expected_T = (1 - smoothing) * picked_T
    if smoothing:
        expected_T = expected_T + smoothing * logits_TV.mean(-1)
    return (log_z_T - expected_T + z_loss * log_z_T.square()) * counted_T
