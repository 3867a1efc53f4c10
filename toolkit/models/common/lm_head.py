"""The output head, which also computes the loss.

Shapes: B batch, S sequence, T = B·S tokens, D model dim, V vocabulary, or the labels of a classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.loss import Linear, chunked_loss, linear_losses, token_losses
from toolkit.models.common.args import ModelArgs


class OutputHead(nn.Module):
    """Maps hidden states to logits, or directly to the loss, so that a sharded head is gathered only once.

    Attributes:
        reduction: reduction of the token losses as in torch: "sum" (a scalar) or "none" (T,); "pairs" of a
            distilled model (T, 2); or "scores", of a classification head.
        top_k: if set, the head is a teacher's: it returns :meth:`top_log_probs` instead of losses.
    """

    reduction = "sum"
    top_k: int | None = None

    def __init__(self, args: ModelArgs, loss_chunk_tokens: int):
        super().__init__()
        self.weight = None
        if not args.tie_embeddings:
            self.weight = nn.Parameter(nn.init.normal_(torch.empty(args.vocab_size, args.dim), std=0.02))
        self.loss_chunk_tokens = loss_chunk_tokens
        # Functions of hidden states and a weight; torch.compile and tensor parallelism replace them.
        self.logits: Linear = F.linear
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = head_loss
        # Function of logits and labels: the training loss, if it is not plain cross-entropy.
        self.training_losses: Callable[[Tensor, Tensor], Tensor] | None = None

    def use_linear(self, linear: Linear) -> None:
        """Compute logits by ``linear`` instead of F.linear."""
        self.logits, self.loss = linear, partial(head_loss, linear=linear)

    def forward(self, h_BSD: Tensor, labels: Tensor | None = None, tied_VD: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or the loss of ``labels`` (B, S); a distilled model has labels
        (B, S, 1 + 2K). ``tied_VD`` is the tied embedding."""
        weight_VD = self.weight if tied_VD is None else tied_VD
        assert weight_VD is not None, "a tied head needs the embedding"
        if labels is None:
            return self.logits(h_BSD, weight_VD)
        if self.top_k is not None:
            return self.top_log_probs(h_BSD, weight_VD, self.top_k)
        custom = self.training_losses if self.training else None
        if self.reduction == "pairs" and labels.ndim == 2:  # a pass before the teacher's, which counts loads
            custom = None
        loss = self.loss if custom is None else partial(self._loss_of_logits, custom)
        losses_T = chunked_loss(
            loss,
            h_BSD.flatten(0, 1),
            weight_VD,
            labels.flatten(0, 1),
            chunk_tokens=self.loss_chunk_tokens,
            recompute=weight_VD.requires_grad or getattr(loss, "func", loss) is not head_loss,
        )
        return losses_T.sum() if self.reduction == "sum" else losses_T

    def top_log_probs(self, h_BSD: Tensor, weight_VD: Tensor, k: int) -> Tensor:
        """Return the ``k`` most probable tokens of each position, as floating-point numbers, and their
        log-probabilities, (B, S, 2K) in at least fp32."""
        found = []
        for chunk_TD in h_BSD.flatten(0, 1).split(self.loss_chunk_tokens or h_BSD[..., 0].numel()):
            logits_TV = self.logits(chunk_TD, weight_VD)
            values_TK, tokens_TK = logits_TV.topk(k)
            precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            log_probs_TK = values_TK - precise_TV.logsumexp(-1, keepdim=True)
            found.append(torch.cat([tokens_TK.to(precise_TV.dtype), log_probs_TK], -1))
        return torch.cat(found).unflatten(0, h_BSD.shape[:2])

    def _loss_of_logits(
        self, losses: Callable[[Tensor, Tensor], Tensor], h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor
    ) -> Tensor:
        return losses(self.logits(h_TD, weight_VD), labels_T)


def head_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, linear: Linear = F.linear) -> Tensor:
    if torch.compiler.is_compiling():  # inductor fuses the operators between the matmuls
        return token_losses(linear(h_TD, weight_VD), labels_T)
    return linear_losses(h_TD, weight_VD, labels_T, linear)
