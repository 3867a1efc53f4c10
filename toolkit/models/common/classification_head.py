"""A head that says to which of some classes a sequence belongs, with its loss and the counts of a validation.

It scores every token, and the label of a sequence stands at its last token, which alone counts: a row may
hold several documents, or a part of one (context parallelism). transformers pools the same token, the last
that is no padding.

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
    """Hidden states to scores, through fully connected layers with SiLU behind each, if there are any."""

    weight: nn.Parameter
    tensor_style = "classifier"

    def __init__(self, args: ModelArgs, classifier: Classifier):
        nn.Module.__init__(self)
        sizes = (args.dim, *classifier.hidden_sizes)
        self.hidden = nn.ModuleList(
            nn.Linear(size, next_size, bias=False) for size, next_size in zip(sizes, sizes[1:], strict=False)
        )
        self.weight = nn.Parameter(torch.empty(len(classifier.labels), sizes[-1]))
        self.logits = F.linear
        self.loss = head_loss
        self.training_losses = None
        # (3, L): right answers, answers and sequences of each class, of this rank's tokens.
        self.counts: Tensor | None = None

    def forward(self, h_BSD: Tensor, labels: Tensor | None = None, tied_VD: Tensor | None = None) -> Tensor:
        """Scores (B, S, L), or the summed loss of ``labels`` (B, S). In evaluation also counts answers."""
        for layer in self.hidden:
            h_BSD = F.silu(layer(h_BSD))
        if labels is None:
            return self.logits(h_BSD, self.weight)
        h_TD, labels_T = h_BSD.flatten(0, 1), labels.flatten()
        if not self.training:
            self._count(F.linear(h_TD, self.weight), labels_T)
        return self.loss(h_TD, self.weight, labels_T).sum()

    @torch.no_grad()
    def _count(self, scores_TL: Tensor, labels_T: Tensor) -> None:
        answers_T, counted_T = scores_TL.argmax(-1), (labels_T != IGNORED_LABEL).long()
        classes_T = labels_T.clamp(min=0)
        if self.counts is None:
            self.counts = torch.zeros(3, scores_TL.shape[-1], dtype=torch.int64, device=scores_TL.device)
        self.counts[0].index_add_(0, classes_T, counted_T * (answers_T == classes_T))
        self.counts[1].index_add_(0, answers_T, counted_T)
        self.counts[2].index_add_(0, classes_T, counted_T)
