"""Train on one global batch: count its tokens, accumulate gradients over micro-batches, clip, update.

The loss of a micro-batch is the *sum* over its tokens divided by the number of valid tokens (or the
objective's divisor) in the global batch, on all ranks and in all micro-batches. Losses added by blocks are
divided by the number of all tokens in the global batch. A small all-reduce computes these numbers before the
first backward. Gradients are therefore plain sums, which do not depend on how the batch is split.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.optim.ema import weight_average
from toolkit.optim.grad_clip import clip_, global_norm
from toolkit.optim.optimizer import set_learning_rate
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, count_valid, divisor
from toolkit.step_hooks import StepResult

FINITE = torch.finfo(torch.float64).max

if TYPE_CHECKING:  # imported only by runs that use them
    from toolkit.optim.optimizer_in_backward import StepInBackward
    from toolkit.parallel.guard import Guard


@dataclass
class TrainState:
    """Progress of a run.

    The learning rate schedule counts steps from ``schedule_start``, which is nonzero if a part of the
    checkpoint was not loaded. It is negative if the step was excluded: the run counts from 0, but the
    schedule continues.
    """

    step: int = 0
    tokens: int = 0
    schedule_start: int = 0
    best_validation: float | None = None  # or another metric of keep_best, negated if higher is better
    best_step: int | None = None  # the step of best_validation
    best_of: str | None = None  # identity of the validation samples that best_validation was measured on
    before: dict[str, float] = field(default_factory=dict)  # losses before the first step
    health: dict[str, Any] = field(default_factory=dict)  # state of the [health] checks
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # rank 0 saves its own

    def note_best(self, value: float) -> None:
        """Record the step if ``value`` is the lowest so far (lower is better)."""
        if math.isfinite(value) and (self.best_validation is None or not self.best_validation <= value):
            self.best_validation, self.best_step = value, self.step


class TrainStep:
    """One training step, called with this rank's micro-batches of a global batch.

    With ``in_backward`` the optimizer is a :class:`StepInBackward`, which requires a single micro-batch and
    an infinite ``max_norm``.
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
        self.in_backward = cast("StepInBackward", optimizer) if in_backward else None
        assert self.in_backward is None or math.isinf(max_norm), (
            "the preflight rejects clipping after the update"
        )
        self.limits = FINITE, FINITE  # largest loss and gradient norm of an accepted batch
        self.guard: Guard | None = None  # handles rejected batches; without a guard they end the run
        self.on_gradients: Callable[[], object] | None = None  # called before gradients are clipped
        self.updates_ahead = False
        if self.in_backward is None:
            from toolkit.optim.update_ahead import can_update_ahead

            self.updates_ahead = can_update_ahead(optimizer, device)

    def __call__(
        self, batches: Sequence[MicroBatch], *, learning_rate: float, stop: bool = False
    ) -> StepResult:
        """Run the step and return its global loss, gradient norm (before clipping) and token count.

        ``stop`` requests the end of the run; it is reduced together with the token count.

        Raises:
            TrainingError: the loss or the gradient norm is not finite, or the guard ends the run; parameters
                stay unchanged unless they were updated in backward.
        """
        assert self.in_backward is None or len(batches) == 1, "the preflight rejects accumulation here"
        model_parts = self.model_parts
        batches = [model_parts.prepare(batch, self.device) for batch in batches]
        local_tokens = sum(tokens.numel() for batch in batches if (tokens := batch["tokens"]) is not None)
        local_counts = [
            count_valid(batches),
            model_parts.objective.count(batches),
            torch.full((), local_tokens, dtype=torch.int64, device=self.device),
        ]
        local_counts = [count * model_parts.is_loss_rank for count in local_counts]
        # Filled on the device: a copy from the host would synchronize.
        counts = torch.stack([*local_counts, torch.full((), int(stop), device=self.device)])
        dist.all_reduce(counts)
        tokens, items, all_tokens, stops = counts.unbind()
        if bitwise := model_parts.bitwise:  # items may have weights
            of_batches = [model_parts.objective.count([batch]).double() for batch in batches]
            items = bitwise.total(torch.stack(of_batches)[:, None] * model_parts.is_loss_rank)[0]
        scale = 1.0 / divisor(items).double()
        set_learning_rate(self.optimizer, learning_rate)
        rows = model_parts.backward(batches, scale, 1.0 / divisor(all_tokens).double())
        local_sums = rows.sum(0)
        experts = model_parts.expert_load
        loads = experts.take(self.device) if experts else local_sums.new_zeros(0)
        sums = torch.cat([local_sums, loads.flatten()])
        dist.all_reduce(sums)
        total, loads = sums[: len(local_sums)], sums[len(local_sums) :].view_as(loads)
        parameters = [parameter for _, parameter in model_parts.named_parameters()]
        if self.in_backward:
            norm = self.in_backward.gradient_norm(device=self.device)
        elif bitwise:
            total, norm = bitwise.total(rows), bitwise.norm(parameters, device=self.device)
        else:
            norm = global_norm(parameters, device=self.device)
        if self.on_gradients is not None:
            self.on_gradients()
        measured = torch.cat([torch.stack([norm, tokens.double(), stops.double()]), total * scale])
        names = model_parts.names
        if experts:
            measured, names = torch.cat([measured, experts.metrics(loads)]), (*names, *experts.names)
        grad_norm, count, stop_count, mean, *others = self._read(measured)
        accepted = mean <= self.limits[0] and grad_norm <= self.limits[1]  # False for NaN
        if not accepted:
            from toolkit.parallel.nonfinite import reject_batch  # not needed while all losses are finite

            found: dict[str, Any] = {"loss": mean, "grad_norm": grad_norm}
            reject_batch(
                model_parts, batches, local_sums[0], early=self.in_backward, guard=self.guard, **found
            )
        elif not self.updates_ahead:
            clip_([*parameters, *(copy for _, copy in model_parts.tied_copies())], self.max_norm, grad_norm)
            self.optimizer.step()
        if accepted and (average := weight_average(self.optimizer)):
            average.update()
        if accepted and experts:
            experts.update_biases(loads)
        self.optimizer.zero_grad()
        reported = dict(zip(names, others, strict=True))
        return StepResult(mean, grad_norm, int(count), stop_count > 0, reported)

    def _read(self, measured: Tensor) -> list[float]:
        """Copy the gradient norm, two counts, the loss and other reported values to the host.

        This is the step's only synchronization. It is necessary because a nonfinite gradient must not reach
        the parameters, and all ranks must know of a stop request.
        """
        if not self.updates_ahead:
            return cast("list[float]", measured.tolist())
        from toolkit.optim.update_ahead import AsyncRead, update_ahead

        reading = AsyncRead(measured)
        sound = (measured[3] <= self.limits[0]) & (measured[0] <= self.limits[1])
        update_ahead(self.optimizer, valid=sound, norm=measured[0], max_norm=self.max_norm)
        return reading.wait()
