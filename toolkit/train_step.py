"""One global batch: count its tokens, accumulate gradients over micro-batches, clip, update.

The loss of a micro-batch is a *sum* over its tokens, divided by the number of valid tokens in the
whole global batch (all ranks, all micro-batches), which one small all-reduce finds before the first
backward; or by that of whatever else the objective is a mean over. Gradients are then plain sums
everywhere: however the batch is cut, they are the same.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.optim.grad_clip import clip_, global_norm
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, count_valid, divisor
from toolkit.step_hooks import StepResult

FINITE = torch.finfo(torch.float64).max

if TYPE_CHECKING:  # read only by runs that use it
    from toolkit.optim.optimizer_in_backward import StepInBackward
    from toolkit.parallel.guard import Guard


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
    best_of: str | None = None  # the samples that it is of: those of this run's validation, if it has one
    before: dict[str, float] = field(default_factory=dict)  # losses that the run began with
    health: dict[str, Any] = field(default_factory=dict)  # what [health] remembers of the updates
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # rank 0's is saved


class TrainStep:
    """Callable on the micro-batches of this rank's part of one global batch.

    ``in_backward`` says that the optimizer is a :class:`StepInBackward`, which takes one micro-batch and
    ``max_norm`` infinity.
    """

    def __init__(
        self,
        model_parts: ModelParts,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float,
        device: torch.device,
        in_backward: bool = False,
    ):
        self.model_parts = model_parts
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.device = device
        self.early = cast("StepInBackward", optimizer) if in_backward else None
        assert self.early is None or math.isinf(max_norm), "the preflight refuses to clip after the update"
        self.limits = FINITE, FINITE  # of loss and gradient norm, beyond which a batch is refused
        self.guard: Guard | None = None  # decides what follows; else the run ends
        self.ahead = False
        if self.early is None:
            from toolkit.optim.update_ahead import can_update_ahead

            self.ahead = can_update_ahead(optimizer, device)

    def __call__(
        self, batches: Sequence[MicroBatch], *, learning_rate: float, stop: bool = False
    ) -> StepResult:
        """Run the step and return its global loss, gradient norm (before clipping) and token count.

        ``stop`` is this rank's wish to end the run, which travels with the token count.

        Raises:
            TrainingError: the loss or the gradient norm is not finite, or the guard ends the run; parameters
                are left as they were, unless they were updated in backward.
        """
        assert self.early is None or len(batches) == 1, "the preflight refuses to accumulate here"
        model_parts = self.model_parts
        batches = [model_parts.prepare(batch, self.device) for batch in batches]
        own_counts = [count_valid(batches), model_parts.objective.count(batches)]
        own_counts = [count * model_parts.is_loss_rank for count in own_counts]
        # Filled on the device: a copy of a number of the host would wait for it.
        counts = torch.stack([*own_counts, torch.full((), int(stop), device=self.device)])
        dist.all_reduce(counts)
        tokens, items, stops = counts.unbind()
        scale = 1.0 / divisor(items).double()
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
        numbers = torch.cat([torch.stack([norm, tokens.double(), stops.double()]), total * scale])
        grad_norm, count, stop_count, mean, *others = self._read(numbers)
        if not (mean <= self.limits[0] and grad_norm <= self.limits[1]):  # a NaN is not
            from toolkit.parallel.nonfinite import refuse  # a run that goes well does not need it

            found: dict[str, Any] = {"loss": mean, "grad_norm": grad_norm}
            refuse(model_parts, batches, own[0], early=self.early, guard=self.guard, **found)
        elif not self.ahead:
            clip_([*parameters, *(copy for _, copy in model_parts.tied_copies())], self.max_norm, grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        reported = dict(zip(model_parts.names, others, strict=True))
        return StepResult(mean, grad_norm, int(count), stop_count > 0, reported)

    def _read(self, numbers: Tensor) -> list[float]:
        """The norm, two counts, the loss and what else is reported: the only wait for the device in a step,
        for an update with a broken gradient must not happen, and all ranks have to know who asks to stop."""
        if not self.ahead:
            return cast("list[float]", numbers.tolist())
        from toolkit.optim.update_ahead import Reading, update_ahead

        reading = Reading(numbers)
        sound = (numbers[3] <= self.limits[0]) & (numbers[0] <= self.limits[1])
        update_ahead(self.optimizer, sound=sound, norm=numbers[0], max_norm=self.max_norm)
        return reading.wait()
