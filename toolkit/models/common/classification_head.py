"""Sequence classification head, with its loss and the counts for validation metrics.

The head scores every token, because a row may contain several documents or, with context parallelism, a part
of one. The label of a sequence is at its last token; other tokens are ignored. transformers uses the same
token, the last one that is not padding.

Shapes: B batch, S sequence, T = B·S tokens, D model dim, L labels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.loss import IGNORED_LABEL
from toolkit.models.common.args import Classifier, ModelArgs
from toolkit.models.common.lm_head import OutputHead, head_loss


class ClassificationHead(OutputHead):
    """Maps hidden states to scores, through optional fully connected layers, each followed by SiLU."""

    weight: nn.Parameter
    tensor_style = "classifier"

    def __init__(self, args: ModelArgs, classifier: Classifier):
        nn.Module.__init__(self)
        sizes = (args.dim, *classifier.hidden_sizes)
        self.hidden = nn.ModuleList(
            nn.Linear(fan_in, fan_out, bias=False) for fan_in, fan_out in zip(sizes, sizes[1:], strict=False)
        )
        self.weight = nn.Parameter(torch.empty(len(classifier.labels), sizes[-1]))
        self.logits = F.linear
        self.loss = head_loss
        self.training_losses = None
        # (3, L): correct predictions, predictions and sequences per class, over this rank's tokens.
        self.counts: Tensor | None = None

    def forward(self, h_BSD: Tensor, labels: Tensor | None = None, tied_VD: Tensor | None = None) -> Tensor:
        """Return scores (B, S, L), or the summed loss of ``labels`` (B, S). In eval mode, count predictions.
        With the reduction "scores", return scores in at least fp32, for objectives that compare them."""
        for layer in self.hidden:
            h_BSD = F.silu(layer(h_BSD))
        if labels is None:
            return self.logits(h_BSD, self.weight)
        if self.reduction == "scores":
            scores_BSL = self.logits(h_BSD, self.weight)
            # A copy, because FSDP's hooks need an output that is not a view.
            return scores_BSL.to(torch.promote_types(scores_BSL.dtype, torch.float32), copy=True)
        h_TD, labels_T = h_BSD.flatten(0, 1), labels.flatten()
        if not self.training:
            self._count(F.linear(h_TD, self.weight), labels_T)
        return self.loss(h_TD, self.weight, labels_T).sum()

    @torch.no_grad()
    def _count(self, scores_TL: Tensor, labels_T: Tensor) -> None:
        predicted_T, counted_T = scores_TL.argmax(-1), (labels_T != IGNORED_LABEL).long()
        classes_T = labels_T.clamp(min=0)
        if self.counts is None:
            self.counts = torch.zeros(3, scores_TL.shape[-1], dtype=torch.int64, device=scores_TL.device)
        self.counts[0].index_add_(0, classes_T, counted_T * (predicted_T == classes_T))
        self.counts[1].index_add_(0, predicted_T, counted_T)
        self.counts[2].index_add_(0, classes_T, counted_T)
