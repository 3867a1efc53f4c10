"""One global batch: count its tokens, accumulate gradients over micro-batches, clip, update.

The loss of a micro-batch is a *sum* over its tokens, divided by the number of valid tokens in the
whole global batch (all ranks, all micro-batches), which one small all-reduce finds before the first
backward; or by that of whatever else the objective is a mean over. Gradients are then plain sums
everywhere: however the batch is cut, they are the same.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import TrainingError, first_few
from toolkit.optim.grad_clip import clip_, global_norm, nonfinite_parameters
from toolkit.optim.optimizer_in_backward import StepInBackward
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, count_valid


@dataclass
class TrainState:
    """How far a run is.

    The schedule of the learning rate counts steps from ``schedule_start``. That is not 0 where a part of the
    checkpoint that the run goes on from was not loaded: below it where the step was left out, so that the
    run counts anew and the schedule does not.
    """

    step: int = 0
    tokens: int = 0
    schedule_start: int = 0
    best_validation: float | None = None
    best_step: int | None = None  # of that validation loss
    before: dict[str, float] = field(default_factory=dict)  # losses that the run began with
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # rank 0's is saved


@dataclass(frozen=True)
class StepResult:
    """Results of a global batch: ``loss`` is the mean a token (nats), or the objective's, ``tokens`` how many
    labels counted, ``stop`` whether any rank asked to stop after this step, ``reported`` what the objective
    has beside the loss."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    reported: Mapping[str, float] = field(default_factory=dict)


class TrainStep:
    """Callable on the micro-batches of this rank's part of one global batch.

    A :class:`StepInBackward` takes one micro-batch and ``max_norm`` infinity.
    """

    def __init__(
        self,
        model_parts: ModelParts,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float,
        device: torch.device,
    ):
        self.model_parts = model_parts
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.device = device
        self.early = optimizer if isinstance(optimizer, StepInBackward) else None
        assert self.early is None or math.isinf(max_norm), "the preflight refuses to clip after the update"

    def __call__(
        self, batches: Sequence[MicroBatch], *, learning_rate: float, stop: bool = False
    ) -> StepResult:
        """Run the step and return its global loss, gradient norm (before clipping) and token count.

        ``stop`` is this rank's wish to end the run, which travels with the token count.

        Raises:
            TrainingError: the loss or the gradient norm is not finite; parameters are left as they were,
                unless they were updated in backward.
        """
        assert self.early is None or len(batches) == 1, "the preflight refuses to accumulate here"
        model_parts = self.model_parts
        batches = [model_parts.prepare(batch, self.device) for batch in batches]
        own_counts = [count_valid(batches), model_parts.objective.count(batches)]
        own_counts = [count * model_parts.is_loss_rank for count in own_counts]
        counts = torch.stack([*own_counts, torch.tensor(int(stop), device=self.device)])
        dist.all_reduce(counts)
        tokens, items, stops = counts.unbind()
        # A batch without a single valid label has loss 0 and gradient 0, not 0/0.
        scale = 1.0 / items.clamp(min=1).double()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        own = model_parts.backward(batches, scale)
        total = own.clone()
        dist.all_reduce(total)
        parameters = [parameter for _, parameter in model_parts.named_parameters()]
        norm = (
            self.early.gradient_norm(device=self.device)
            if self.early
            else global_norm(parameters, device=self.device)
        )
        # The only wait for the device in a step: an update with a broken gradient must not happen.
        grad_norm, count, stop_count, mean, *others = torch.cat(
            [torch.stack([norm, tokens.double(), stops.double()]), total * scale]
        ).tolist()
        if not (math.isfinite(mean) and math.isfinite(grad_norm)):
            self._refuse(mean, grad_norm, own, batches)
        clip_([*parameters, *(copy for _, copy in model_parts.tied_copies())], self.max_norm, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        reported = dict(zip(model_parts.objective.names, others, strict=True))
        return StepResult(mean, grad_norm, int(count), stop_count > 0, reported)

    def _refuse(self, loss: float, grad_norm: float, own: Tensor, batches: Sequence[MicroBatch]) -> NoReturn:
        if self.early:
            names = self.early.nonfinite()
            updated = "were updated by this step already, in backward (optimizer.early_step_in_backward)"
        else:
            names = nonfinite_parameters(self.model_parts.named_parameters())
            updated = "were not updated by this step"
        if math.isfinite(loss):
            began = f"gradients that are not finite: {_where(names) or 'none (the norm itself overflowed)'}"
        else:
            from toolkit.parallel.nonfinite import origins  # a run that goes well does not need it

            # After an update in backward, another forward pass would see other parameters.
            found = [] if self.early else origins(self.model_parts, batches)
            own_loss = [] if own[0].isfinite() else [f"its part of the loss{self.model_parts.coordinates}"]
            told = first_few([str(one) for one in found], 3) or _where(own_loss)
            told = told or "the sum of the ranks' losses"
            began = f"it began in {told}"
        raise TrainingError(
            f"the loss is {loss} and the gradient norm {grad_norm}: training cannot go on\n"
            f"  {began}\n"
            "  fix:  lower optimizer.lr, lengthen lr_scheduler.warmup_steps, or resume from an earlier "
            f"checkpoint (checkpoint.load_step); the parameters {updated}"
        )


def _where(names: Sequence[str]) -> str:
    """The ranks that have ``names`` to tell, and theirs; the same text on all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return "; ".join(f"rank {rank}: {first_few(found, 3)}" for rank, found in enumerate(gathered) if found)
