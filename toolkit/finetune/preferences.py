"""Preference optimization: increases the probability of the chosen answer to a prompt over that of the
rejected one.

DPO and KTO compare the model with a reference. If the reference is the model without its adapter, it runs
first, without gradients; its token losses minus the model's, summed over an answer, are the log-ratio of the
answer's probabilities. Otherwise the sums of the reference are read from disk
(:mod:`toolkit.finetune.reference`). CPO, SimPO and ORPO have no reference: the sums are log-probabilities.
Reward models score answers. A pair is two documents of a row: document 2n is chosen, and 2n + 1 rejected. All
pairs have equal weight. KTO learns from single, labeled answers.

Shapes: B batch, S sequence, W maximum number of documents in a row, even, N = W/2 pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.config.finetune import CPO, DPO, KTO, ORPO, Finetune, Reward, SimPO
from toolkit.data.dataloader import FIELDS
from toolkit.data.preference_rows import MISMATCHED
from toolkit.loss import IGNORED_LABEL
from toolkit.parallel.autograd_collectives import all_reduce
from toolkit.parallel.objective import MicroBatch, Objective, divisor

PairLosses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of the log-probabilities (or log-ratios) of the answers and their numbers of trained tokens, both
(B, N, 2), that returns the loss of each pair (B, N), and the rewards (B, N, 2)."""


class PreferenceObjective(Objective):
    """The mean of ``losses`` over pairs, with the reward metrics that trl reports.

    The ranks of ``group`` have shards of the same sequences.
    """

    reduction: str = "none"
    names: tuple[str, ...] = (
        "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    )  # fmt: skip
    fields: tuple[str, ...] = ("answers", "learnt")
    token_fields: tuple[str, ...] = ("answers",)

    def __init__(self, losses: PairLosses, group: dist.ProcessGroup | None):
        self.losses = losses
        self.group = group
        # The ranks of a group have the same sums, so only one of them counts.
        self.counts = group is None or group.rank() == 0

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        documents_BS, labels_BS = _required(batch, "documents"), _required(batch, "labels")
        answers_BS = documents_BS.clamp(min=0).long()  # padding has no labels
        length = labels_BS.shape[1]
        learnt_BW = _by_answer((labels_BS != IGNORED_LABEL).long(), answers_BS, length + length % 2)
        return batch | {"answers": answers_BS, "learnt": learnt_BW}

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([_pairs(batch)[1].sum() for batch in batches]).sum() * self.counts

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        learnt_BN2, valid_BN = _pairs(batch)
        scores_BW = self.scores(output, batch)
        losses_BN, rewards_BN2 = self.compare(scores_BW.unflatten(1, (-1, 2)), learnt_BN2, batch)
        loss = torch.where(valid_BN, losses_BN, 0).sum()
        chosen_BN, rejected_BN = (rewards_BN2.detach() * valid_BN[..., None]).unbind(-1)
        margins_BN = chosen_BN - rejected_BN
        sums = [it.sum().double() for it in (chosen_BN, rejected_BN, margins_BN > 0, margins_BN)]
        return loss, torch.stack([loss.detach(), *sums]) * self.counts

    def compare(self, scores_BN2: Tensor, learnt_BN2: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the losses and rewards of pairs, see :data:`PairLosses`."""
        return self.losses(scores_BN2, learnt_BN2)

    def scores(self, output: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each answer (B, W) fp64, given the head's token losses."""
        return self.by_answer(-output, batch)

    def by_answer(self, scores_T: Tensor, batch: MicroBatch) -> Tensor:
        """Return the sums (B, W) fp64 over the tokens of each answer, on all ranks of the group."""
        answers_BS, width = _required(batch, "answers"), _required(batch, "learnt").shape[1]
        sums_BW = _by_answer(scores_T.view_as(answers_BS).double(), answers_BS, width)
        return sums_BW if self.group is None else all_reduce(sums_BW, self.group)


class RewardObjective(PreferenceObjective):
    """The mean over pairs of a reward model's losses. The head scores the last token of each answer, the only
    one with a label."""

    reduction = "scores"
    fields = ("answers", "learnt", "labels", "margin")

    def __init__(self, options: Reward, group: dist.ProcessGroup | None):
        super().__init__(lambda scores, _: (scores, scores), group)
        self.options = options

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        margin_BS, width = _required(batch, "margin"), _required(batch, "labels").shape[1]
        return super().prepare(batch) | {"margin": F.pad(margin_BS, (0, width % 2))}

    def compare(self, scores_BN2: Tensor, learnt_BN2: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        margins_BN = _margins(scores_BN2) - _required(batch, "margin")[:, ::2].double()
        center = self.options.center_rewards_coefficient * scores_BN2.sum(-1).square()
        return center - F.logsigmoid(margins_BN), scores_BN2

    def scores(self, output: Tensor, batch: MicroBatch) -> Tensor:
        """Return the score of each answer."""
        labels_BS = _required(batch, "labels")
        scores_BS = torch.where(labels_BS == IGNORED_LABEL, 0, output.view_as(labels_BS))
        return self.by_answer(scores_BS, batch)


class DPOObjective(PreferenceObjective):
    """A :class:`PreferenceObjective` relative to the model without its adapter, or to ``stored``
    log-probabilities (conversations, columns) fp64 of the run's conversations."""

    fields: tuple[str, ...] = ("answers", "learnt", "reference")
    columns: tuple[str, ...] = ("",)
    """Prefixes of the answers of a conversation that have log-probabilities."""
    stored: Tensor | None = None

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        batch = super().prepare(batch)
        conversations_BS = batch.get("conversations")
        if conversations_BS is None:
            return batch
        padding = _required(batch, "learnt").shape[1] - conversations_BS.shape[1]
        batch["conversations"] = conversations_BW = F.pad(conversations_BS, (0, padding))
        if self.stored is None:  # it is being computed
            return batch
        columns = self.stored[conversations_BW].unbind(-1)
        return batch | {f"{prefix}reference": it for prefix, it in zip(self.columns, columns, strict=True)}

    def answer(self, batch: MicroBatch, prefix: str) -> MicroBatch:
        """Return the fields of the prepared answers with ``prefix``, as the model reads them."""
        names = ("answers", "reference", *FIELDS)
        return batch | {name: batch.get(f"{prefix}{name}") for name in names}

    def log_probs(self, batch: MicroBatch, forward: Callable[[MicroBatch], Tensor | None]) -> Tensor | None:
        """Return the log-probabilities of the answers (B, W, columns), if the last stage is on this rank;
        0 without an answer."""
        answers = [self.answer(batch, prefix) for prefix in self.columns]
        outputs = [forward(each) for each in answers]
        sums = [self.by_answer(-x, it) for x, it in zip(outputs, answers, strict=True) if x is not None]
        return torch.stack(sums, dim=-1) * self.counts if sums else None

    def with_reference(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> MicroBatch:
        if self.stored is not None:
            return batch
        with torch.no_grad(), without_adapter(models):
            losses_T = forward(batch)
        return batch | {
            "reference": None if losses_T is None else losses_T.view_as(_required(batch, "answers"))
        }

    def scores(self, output: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-ratios of the answers."""
        reference = _required(batch, "reference")
        if self.stored is None:
            return self.by_answer(reference - output.view_as(reference), batch)
        return super().scores(output, batch) - reference


class KTOObjective(DPOObjective):
    """The mean over single answers of KTO's losses, with the reward metrics that trl reports.

    The losses depend on a KL divergence, estimated as the mean log-ratio of the mismatched answers of the
    global batch (:mod:`toolkit.data.preference_rows`), so that it is the same on any mesh. Mismatched answers
    run before the step, without gradients.
    """

    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl")
    fields = ("answers", "learnt", "reference", "desirable")
    token_fields = (
        "answers",
        *(f"{MISMATCHED}{name}" for name in ("tokens", "labels", "positions", "answers")),
    )
    columns = ("", MISMATCHED)
    measures = 3

    def __init__(self, options: KTO, group: dist.ProcessGroup | None):
        super().__init__(partial(dpo_losses, options=DPO()), group)
        self.options = options

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        batch = super().prepare(batch)
        desirable_BS, width = _required(batch, "desirable"), _required(batch, "learnt").shape[1]
        answers_BS = _required(batch, f"{MISMATCHED}documents").clamp(min=0).long()
        padded_BW = F.pad(desirable_BS, (0, width - desirable_BS.shape[1]))
        return batch | {"desirable": padded_BW, f"{MISMATCHED}answers": answers_BS}

    def count(self, batches: Sequence[MicroBatch]) -> Tensor:
        return torch.stack([_answered(batch).sum() for batch in batches]).sum() * self.counts

    def measure(
        self, batch: MicroBatch, models: Sequence[nn.Module], forward: Callable[[MicroBatch], Tensor | None]
    ) -> Tensor:
        """Return the sum of the mismatched answers' log-ratios, and the numbers of answers and of desirable
        ones."""
        other = self.with_reference(self.answer(batch, MISMATCHED), models, forward)
        output, valid_BW = forward(other), _answered(batch)
        total = valid_BW.new_zeros((), dtype=torch.float64)
        if output is not None:
            total = torch.where(valid_BW, self.scores(output, other), 0).sum()
        desirable_BW = valid_BW & _required(batch, "desirable")
        return torch.stack([total, valid_BW.sum(), desirable_BW.sum()]).double() * self.counts

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        assert self.measured is not None
        ratio, count, desired = self.measured
        kl = (ratio / divisor(count)).clamp(min=0)
        valid_BW, desirable_BW = _answered(batch), _required(batch, "desirable")
        ratios_BW = self.scores(output, batch)
        losses_BW = kto_losses(ratios_BW, desirable_BW, kl, self.options)
        loss = torch.where(valid_BW, losses_BW, 0).sum()
        rewards_BW = self.options.beta * ratios_BW.detach() * valid_BW
        # Logged values are divided by the number of all answers.
        chosen = (rewards_BW * desirable_BW).sum() * count / divisor(desired)
        rejected = (rewards_BW * ~desirable_BW).sum() * count / divisor(count - desired)
        sums = torch.stack([loss.detach(), chosen, rejected, chosen - rejected, kl * valid_BW.sum()])
        return loss, sums * self.counts


def preference_objective(options: Finetune, group: dist.ProcessGroup | None) -> PreferenceObjective:
    """Return the objective selected by ``finetune.objective``."""
    match options.objective:
        case "dpo":
            return DPOObjective(partial(dpo_losses, options=options.dpo), group)
        case "kto":
            return KTOObjective(options.kto, group)
        case "reward":
            return RewardObjective(options.reward, group)
        case "cpo":
            return PreferenceObjective(partial(cpo_losses, options=options.cpo), group)
        case "simpo":
            return PreferenceObjective(partial(simpo_losses, options=options.simpo), group)
        case _:
            return PreferenceObjective(partial(orpo_losses, options=options.orpo), group)


def dpo_losses(ratios_BN2: Tensor, learnt_BN2: Tensor, options: DPO) -> tuple[Tensor, Tensor]:
    """Return DPO's losses and rewards."""
    rewards_BN2 = options.beta * ratios_BN2
    if options.loss_type == "hinge":
        return F.relu(1 - _margins(rewards_BN2)), rewards_BN2
    if options.loss_type == "ipo":
        return (_margins(_means(ratios_BN2, learnt_BN2)) - 1 / (2 * options.beta)).square(), rewards_BN2
    return _sigmoid_losses(_margins(rewards_BN2), options.label_smoothing), rewards_BN2


def kto_losses(ratios_BW: Tensor, desirable_BW: Tensor, kl: Tensor, options: KTO) -> Tensor:
    """Return KTO's losses of single answers, given the estimate ``kl`` of the divergence."""
    good_BW = desirable_BW.double()  # fp64, as the ratios
    bad_BW = 1 - good_BW
    weights_BW = options.desirable_weight * good_BW + options.undesirable_weight * bad_BW
    return weights_BW * torch.sigmoid(options.beta * (bad_BW - good_BW) * (ratios_BW - kl))


def cpo_losses(logps_BN2: Tensor, learnt_BN2: Tensor, options: CPO) -> tuple[Tensor, Tensor]:
    """Return CPO's losses, which are DPO's without a reference plus the chosen answer's mean token loss."""
    rewards_BN2 = options.beta * logps_BN2
    margins_BN = _margins(rewards_BN2)
    if options.loss_type == "hinge":
        losses_BN = F.relu(1 - margins_BN)
    else:
        losses_BN = _sigmoid_losses(margins_BN, options.label_smoothing)
    return losses_BN - options.alpha * _means(logps_BN2, learnt_BN2)[..., 0], rewards_BN2


def simpo_losses(logps_BN2: Tensor, learnt_BN2: Tensor, options: SimPO) -> tuple[Tensor, Tensor]:
    """Return SimPO's losses, which compare mean log-probabilities of tokens with a target margin."""
    rewards_BN2 = options.beta * _means(logps_BN2, learnt_BN2)
    return _sigmoid_losses(_margins(rewards_BN2) - options.gamma, options.label_smoothing), rewards_BN2


def orpo_losses(logps_BN2: Tensor, learnt_BN2: Tensor, options: ORPO) -> tuple[Tensor, Tensor]:
    """Return ORPO's losses: the chosen answer's mean token loss, and the odds ratio of the answers."""
    means_BN2 = torch.where(learnt_BN2 > 0, _means(logps_BN2, learnt_BN2), -1)  # finite without tokens
    odds_BN2 = means_BN2 - (-torch.expm1(means_BN2)).log()
    ratios_BN = F.logsigmoid(_margins(odds_BN2))
    return -means_BN2[..., 0] - options.beta * ratios_BN, options.beta * means_BN2


def _margins(values_BN2: Tensor) -> Tensor:
    return values_BN2[..., 0] - values_BN2[..., 1]


def _means(sums_BN2: Tensor, learnt_BN2: Tensor) -> Tensor:
    return sums_BN2 / learnt_BN2.clamp(min=1)


def _sigmoid_losses(margins_BN: Tensor, smoothing: float) -> Tensor:
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


def _answered(batch: MicroBatch) -> Tensor:
    """Return which documents have tokens in the loss (B, W)."""
    return _required(batch, "learnt") > 0


def _required(batch: MicroBatch, name: str) -> Tensor:
    value = batch[name]
    assert value is not None, f"a batch of pairs needs {name}"
    return value


def _by_answer(values_BS: Tensor, answers_BS: Tensor, width: int) -> Tensor:
    """Sum over the tokens of each answer, (B, W). Supports deterministic algorithms."""
    rows = torch.arange(len(values_BS), device=values_BS.device)[:, None] * width
    sums = values_BS.new_zeros(len(values_BS) * width)
    return sums.index_add(0, (answers_BS + rows).flatten(), values_BS.flatten()).unflatten(0, (-1, width))
