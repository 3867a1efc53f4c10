"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290): of two answers to a prompt the
chosen one is to become more probable than the rejected one, as seen from a reference.

The reference is the model without its adapter. It goes first, without gradients, and what is kept of it are
the losses of tokens, from which those of the model are subtracted: what is left, summed over an answer, is
the logarithm of how much more probable the model finds it. A pair is two documents of a row, number 2n
chosen, 2n + 1 rejected. A pair counts once, whatever its length.

Shapes: B batch, S sequence, W documents that a row may have, an even number, N = W/2 pairs.
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
    """The loss of ``options``, a mean over pairs, with the rewards that trl reports. ``group`` has the ranks
    that hold parts of the same sequences."""

    reduction = "none"
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
    fields = ("answers", "learnt", "reference")
    token_fields = ("answers",)

    def __init__(self, options: DPO, group: dist.ProcessGroup | None):
        self.options = options
        self.group = group
        # Ranks of a group have the same sums, of which one counts.
        self.counts = group is None or group.rank() == 0

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        documents_BS, labels_BS = _there(batch, "documents"), _there(batch, "labels")
        answers_BS = documents_BS.clamp(min=0).long()  # padding has no labels
        length = labels_BS.shape[1]
        learnt_BW = _by_answer((labels_BS != IGNORED_LABEL).long(), answers_BS, length + length % 2)
        return batch | {"answers": answers_BS, "learnt": learnt_BW}

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        with torch.no_grad(), without_adapter(models):
            losses_T = forward(batch)
        return batch | {"reference": None if losses_T is None else losses_T.view_as(_there(batch, "answers"))}

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([_pairs(batch)[1].sum() for batch in batches]).sum() * self.counts

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        reference_BS, answers_BS = _there(batch, "reference"), _there(batch, "answers")
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
    """The loss of each pair (B, N) from the log-ratios of its answers, chosen and rejected, and the tokens
    that are learnt of them."""
    margins_BN = options.beta * (ratios_BN2[..., 0] - ratios_BN2[..., 1])
    if options.loss_type == "hinge":
        return F.relu(1 - margins_BN)
    if options.loss_type == "ipo":
        means_BN2 = ratios_BN2 / learnt_BN2.clamp(min=1)
        return (means_BN2[..., 0] - means_BN2[..., 1] - 1 / (2 * options.beta)).square()
    wrong = options.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins_BN) - wrong * F.logsigmoid(-margins_BN)


@contextmanager
def without_adapter(models: Sequence[nn.Module]) -> Iterator[None]:
    """Switch the adapters of ``models`` off for a while."""
    adapters = [module for model in models for module in model.modules() if hasattr(module, "enabled")]
    for adapter in adapters:
        adapter.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True  # type: ignore[assignment]


def _pairs(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Tokens that are learnt of each answer of a pair (B, N, 2), and which pairs there are (B, N)."""
    learnt_BN2 = _there(batch, "learnt").unflatten(1, (-1, 2))
    return learnt_BN2, (learnt_BN2 > 0).all(-1)


def _there(batch: MicroBatch, name: str) -> Tensor:
    found = batch[name]
    assert found is not None, f"a batch of pairs has {name}"
    return found


def _by_answer(values_BS: Tensor, answers_BS: Tensor, width: int) -> Tensor:
    """Sums (B, W) over the tokens of each answer, in an order that deterministic algorithms can keep."""
    rows = torch.arange(len(values_BS), device=values_BS.device)[:, None] * width
    sums = values_BS.new_zeros(len(values_BS) * width)
    return sums.index_add(0, (answers_BS + rows).flatten(), values_BS.flatten()).unflatten(0, (-1, width))
