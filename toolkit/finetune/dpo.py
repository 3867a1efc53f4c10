"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): increases the probability of the
chosen answer to a prompt over that of the rejected one, relative to a reference model.

The reference is the model without its adapter. It runs first, without gradients. Its token losses minus the
model's, summed over an answer, are the log-ratio of the answer's probabilities. A pair is two documents of a
row: 2n is chosen, 2n + 1 rejected. All pairs have equal weight.

Shapes: B batch, S sequence, W maximum number of documents in a row, even, N = W/2 pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.config.finetune import DPO
from toolkit.loss import IGNORED_LABEL
from toolkit.parallel.autograd_collectives import all_reduce
from toolkit.parallel.objective import MicroBatch, Objective


class PreferenceObjective(Objective):
    """The loss of ``options``, averaged over pairs, with the reward metrics that trl reports. The ranks of
    ``group`` have shards of the same sequences."""

    reduction = "none"
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
    fields = ("answers", "learnt", "reference")
    token_fields = ("answers",)

    def __init__(self, options: DPO, group: dist.ProcessGroup | None):
        self.options = options
        self.group = group
        # The ranks of a group have the same sums, so only one of them counts.
        self.counts = group is None or group.rank() == 0

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        documents_BS, labels_BS = _required(batch, "documents"), _required(batch, "labels")
        answers_BS = documents_BS.clamp(min=0).long()  # padding has no labels
        length = labels_BS.shape[1]
        learnt_BW = _by_answer((labels_BS != IGNORED_LABEL).long(), answers_BS, length + length % 2)
        return batch | {"answers": answers_BS, "learnt": learnt_BW}

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        with torch.no_grad(), without_adapter(models):
            losses_T = forward(batch)
        return batch | {
            "reference": None if losses_T is None else losses_T.view_as(_required(batch, "answers"))
        }

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([_pairs(batch)[1].sum() for batch in batches]).sum() * self.counts

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        reference_BS, answers_BS = _required(batch, "reference"), _required(batch, "answers")
        learnt_BN2, valid_BN = _pairs(batch)
        ratios_BS = (reference_BS - output.view_as(reference_BS)).double()
        ratios_BW = _by_answer(ratios_BS, answers_BS, learnt_BN2[0].numel())
        if self.group is not None:
            ratios_BW = all_reduce(ratios_BW, self.group)
        ratios_BN2 = ratios_BW.unflatten(1, (-1, 2))
        loss = (pair_losses(ratios_BN2, learnt_BN2, self.options) * valid_BN).sum()
        chosen_BN, rejected_BN = (self.options.beta * ratios_BN2.detach() * valid_BN[..., None]).unbind(-1)
        margins_BN = chosen_BN - rejected_BN
        sums = [it.sum().double() for it in (chosen_BN, rejected_BN, margins_BN > 0, margins_BN)]
        return loss, torch.stack([loss.detach(), *sums]) * self.counts


def pair_losses(ratios_BN2: Tensor, learnt_BN2: Tensor, options: DPO) -> Tensor:
    """Return the loss of each pair (B, N), given the log-ratios of its chosen and rejected answers and their
    numbers of trained tokens."""
    margins_BN = options.beta * (ratios_BN2[..., 0] - ratios_BN2[..., 1])
    if options.loss_type == "hinge":
        return F.relu(1 - margins_BN)
    if options.loss_type == "ipo":
        means_BN2 = ratios_BN2 / learnt_BN2.clamp(min=1)
        return (means_BN2[..., 0] - means_BN2[..., 1] - 1 / (2 * options.beta)).square()
    smoothing = options.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margins_BN) - smoothing * F.logsigmoid(-margins_BN)


@contextmanager
def without_adapter(models: Sequence[nn.Module]) -> Iterator[None]:
    """Disable the adapters of ``models`` inside the context."""
    adapters = [module for model in models for module in model.modules() if hasattr(module, "enabled")]
    for adapter in adapters:
        adapter.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True  # type: ignore[assignment]


def _pairs(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the number of trained tokens of each answer (B, N, 2), and a mask of valid pairs (B, N)."""
    learnt_BN2 = _required(batch, "learnt").unflatten(1, (-1, 2))
    return learnt_BN2, (learnt_BN2 > 0).all(-1)


def _required(batch: MicroBatch, name: str) -> Tensor:
    value = batch[name]
    assert value is not None, f"a batch of pairs needs {name}"
    return value


def _by_answer(values_BS: Tensor, answers_BS: Tensor, width: int) -> Tensor:
    """Sum over the tokens of each answer: (B, W). Supports deterministic algorithms."""
    rows = torch.arange(len(values_BS), device=values_BS.device)[:, None] * width
    sums = values_BS.new_zeros(len(values_BS) * width)
    return sums.index_add(0, (answers_BS + rows).flatten(), values_BS.flatten()).unflatten(0, (-1, width))
