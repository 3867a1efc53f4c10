"""Policy for batches with a nonfinite loss or gradient norm, or a spike: stop, skip, or roll back.

The decision depends on the global loss and norm and on the values of earlier updates, which are equal on all
ranks, and on all meshes up to rounding. These values are saved in checkpoints, so a resumed run makes the
same decisions. The rule for spikes is that of AllenAI's SkipStepOptimizer (arXiv:2501.00656).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from toolkit.config.job import Health
from toolkit.errors import TrainingError

FINITE = sys.float_info.max
"""The largest finite value; ``x <= FINITE`` is false for infinities and NaN."""


@dataclass(frozen=True)
class RejectedBatch:
    """A batch excluded from training: the reason, and whether the run rolls back."""

    reason: str
    loss: float
    grad_norm: float
    rolls_back: bool


class Guard:
    """Applies the policy of ``options``.

    ``memory`` returns the history saved with the run as JSON: "losses" and "norms" of the latest updates, and
    "skips", the number of batches skipped since the last update.

    Attributes:
        rejected: the last batch, if it was rejected.
    """

    def __init__(self, options: Health, memory: Callable[[], dict[str, Any]]):
        self.options, self._memory = options, memory
        self.rejected: RejectedBatch | None = None

    @property
    def continues_after_nan(self) -> bool:
        return self.options.nan_policy != "stop"

    def limits(self) -> tuple[float, float]:
        """Return the limits of the next batch's loss and gradient norm."""
        if self.options.loss_spike_policy == "ignore":
            return FINITE, FINITE
        return self._limit("losses"), self._limit("norms")

    def accept(self, loss: float, grad_norm: float) -> None:
        """Record the loss and norm of an update."""
        self._memory()["skips"] = 0
        self._record(loss, grad_norm)

    def _record(self, loss: float, grad_norm: float) -> None:
        memory = self._memory()
        if self.options.loss_spike_policy != "ignore":
            for name, value in (("losses", loss), ("norms", grad_norm)):
                memory[name] = [*memory.get(name, []), value][-self.options.loss_spike_window :]

    def reject_spike(self, loss: float, grad_norm: float) -> None:
        """Reject a batch beyond the limits, and record the limits as its values, so that a lasting rise is
        accepted after some batches while a single spike hardly changes the limits.

        Raises:
            TrainingError: the policy is to stop, or too many batches were skipped.
        """
        spike = " and ".join(
            f"the {name} {value:.4g} is above {limit:.4g}"
            for name, value, limit in zip(
                ("loss", "gradient norm"), (loss, grad_norm), self.limits(), strict=True
            )
            if value > limit
        )
        options, updates = self.options, len(self._memory()["losses"])
        reason = f"{spike}, {options.loss_spike_sigma:g} standard deviations over the last {updates} updates"
        self._reject(options.loss_spike_policy, reason, loss, grad_norm)
        max_loss, max_norm = self.limits()
        self._record(min(loss, max_loss), min(grad_norm, max_norm))

    def reject_nan(self, loss: float, grad_norm: float, origin: str) -> None:
        """Reject a batch with a nonfinite loss or gradient.

        Raises:
            TrainingError: too many batches were skipped.
        """
        reason = f"the loss is {loss} and the gradient norm {grad_norm}: {origin}"
        self._reject(self.options.nan_policy, reason, loss, grad_norm)

    def _reject(self, policy: str, reason: str, loss: float, grad_norm: float) -> None:
        memory, stop = self._memory(), ""
        memory["skips"] = memory.get("skips", 0) + (policy == "skip")
        if policy == "stop":
            stop = 'health.loss_spike_policy is "stop"'
        elif memory["skips"] > self.options.max_skips:
            stop = f"{self.options.max_skips} consecutive batches were skipped (health.max_skips)"
        if stop:
            fix = "lower optimizer.lr, or inspect the samples: llama-toolkit inspect-data"
            raise TrainingError(f"{reason}: training stops because {stop}\n  fix:  {fix}")
        self.rejected = RejectedBatch(reason, loss, grad_norm, policy == "rollback")

    def _limit(self, name: str) -> float:
        values = self._memory().get(name, [])
        if len(values) < max(2, self.options.loss_spike_window // 2):
            return FINITE
        return fmean(values) + self.options.loss_spike_sigma * pstdev(values)
