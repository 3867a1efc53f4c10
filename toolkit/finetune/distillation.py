"""Distillation: the model learns the distribution of a frozen teacher next to the labels (Hinton et al. 2015,
arXiv:1503.02531).

The teacher runs first, on the mesh of the run, without gradients. Its head returns the ``top_k`` largest
log-probabilities of each token, chunk by chunk, so no logits of all tokens exist. They reach the model's head
as labels with more columns.

Shapes: B batch, S sequence, T = B·S tokens, V vocabulary, K = top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from toolkit.config.training import Distillation
from toolkit.loss import token_losses
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, WeightedObjective


class DistillationObjective(WeightedObjective):
    """(1 − w) · cross-entropy + w · divergence from the ``teacher``, averaged over tokens."""

    reduction = "pairs"
    names = ("distillation/cross_entropy", "distillation/divergence")

    def __init__(self, options: Distillation, teacher: ModelParts):
        self.weight, self.teacher, self.models = options.weight, teacher, teacher.models

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        with torch.no_grad():
            top_BSX = self.teacher.forward(batch)
        self.teacher.end_evaluation()
        labels_BS = batch["labels"]
        if top_BSX is None or labels_BS is None:  # the head is on another pipeline rank
            return batch
        return batch | {"labels": torch.cat([labels_BS[..., None].to(top_BSX.dtype), top_BSX], -1)}

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        weights_BS = batch["weights"]
        assert weights_BS is not None
        entropy, divergence = (output * weights_BS.flatten()[:, None]).sum(0).unbind()
        loss = (1 - self.weight) * entropy + self.weight * divergence
        return loss, torch.stack([loss, entropy, divergence]).detach().double()


def distillation_losses(logits_TV: Tensor, targets_TX: Tensor, options: Distillation) -> Tensor:
    """Return cross-entropy and divergence of each token, (T, 2), in at least fp32.

    ``targets_TX`` (T, 1 + 2K) are the label, the tokens that the teacher finds most probable, and their
    log-probabilities. At a temperature τ, both distributions are softmax(logits / τ), and the divergence is
    multiplied by τ², so that its gradient keeps its size. The forward KL divergence compares the teacher's
    probabilities, normalized over the K tokens, with the model's over the vocabulary; the reverse one
    compares both normalized over the K tokens.
    """
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    k = targets_TX.shape[1] // 2
    tokens_TK, given_TK = targets_TX[:, 1 : 1 + k].long(), targets_TX[:, 1 + k :]
    scaled_TV = logits_TV / options.temperature
    teacher_TK = (given_TK / options.temperature).log_softmax(-1).to(logits_TV.dtype)
    if options.divergence == "forward_kl":
        model_TK = scaled_TV.gather(1, tokens_TK) - scaled_TV.logsumexp(-1, keepdim=True)
        terms_TK = teacher_TK.exp() * (teacher_TK - model_TK)
    else:
        model_TK = scaled_TV.gather(1, tokens_TK).log_softmax(-1)
        terms_TK = model_TK.exp() * (model_TK - teacher_TK)
    divergences_T = terms_TK.sum(-1) * options.temperature**2
    return torch.stack([token_losses(logits_TV, targets_TX[:, 0].long()), divergences_T], -1)
