"""The decision about a batch whose loss or gradient norm is not sound: to stop, to skip it, or to roll back.

It is made of the global loss and norm and of those of the updates before, which are the same numbers on every
rank, and on every mesh but for rounding. They travel with checkpoints, so that a run that goes on decides as
it did, or would have done. The rule of spikes is that of AllenAI's SkipStepOptimizer (arXiv:2501.00656).
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
"""The largest number: what is not at most this is not finite."""


@dataclass(frozen=True)
class Refusal:
    """A batch that is not trained on: why, and if the run rolls back."""

    reason: str
    loss: float
    grad_norm: float
    rolls_back: bool


class Guard:
    """The policy of ``options``. ``memory`` gives what the run remembers of its updates: JSON values that are
    saved with it, "losses" and "norms" of the newest, and "skips", batches skipped since the last update.

    Attributes:
        refusal: of the batch that was last looked at, if it was refused.
    """

    def __init__(self, options: Health, memory: Callable[[], dict[str, Any]]):
        self.options, self._memory = options, memory
        self.refusal: Refusal | None = None

    @property
    def goes_on_after_nan(self) -> bool:
        return self.options.nan_policy != "stop"

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm of the next batch that pass."""
        if self.options.loss_spike_policy == "ignore":
            return FINITE, FINITE
        return self._limit("losses"), self._limit("norms")

    def accept(self, loss: float, grad_norm: float) -> None:
        """Remember the numbers of an update."""
        self._memory()["skips"] = 0
        self._remember(loss, grad_norm)

    def _remember(self, loss: float, grad_norm: float) -> None:
        memory = self._memory()
        if self.options.loss_spike_policy != "ignore":
            for name, number in (("losses", loss), ("norms", grad_norm)):
                memory[name] = [*memory.get(name, []), number][-self.options.loss_spike_window :]

    def refuse_spike(self, loss: float, grad_norm: float) -> None:
        """Refuse a batch beyond the limits, which is remembered as one at the limits: what stays high becomes
        usual within some batches, and a single one does not blunt the rule.

        Raises:
            TrainingError: the policy is to stop, or there have been too many.
        """
        told = " and ".join(
            f"the {name} {number:.4g} is above {limit:.4g}"
            for name, number, limit in zip(
                ("loss", "gradient norm"), (loss, grad_norm), self.limits(), strict=True
            )
            if number > limit
        )
        options, updates = self.options, len(self._memory()["losses"])
        spike = f"{told}, {options.loss_spike_sigma:g} standard deviations over the last {updates} updates"
        self._refuse(options.loss_spike_policy, spike, loss, grad_norm)
        most_loss, most_norm = self.limits()
        self._remember(min(loss, most_loss), min(grad_norm, most_norm))

    def refuse_nan(self, loss: float, grad_norm: float, began: str) -> None:
        """Refuse a batch whose loss or gradient is not finite.

        Raises:
            TrainingError: there have been too many.
        """
        told = f"the loss is {loss} and the gradient norm {grad_norm}: {began}"
        self._refuse(self.options.nan_policy, told, loss, grad_norm)

    def _refuse(self, policy: str, told: str, loss: float, grad_norm: float) -> None:
        memory, ended = self._memory(), ""
        memory["skips"] = memory.get("skips", 0) + (policy == "skip")
        if policy == "stop":
            ended = "health.loss_spike_policy says so"
        elif memory["skips"] > self.options.max_skips:
            ended = f"{self.options.max_skips} batches in a row have been skipped already (health.max_skips)"
        if ended:
            fix = "lower optimizer.lr, or look at the samples: python -m tools.inspect_data"
            raise TrainingError(f"{told}: the run stops, since {ended}\n  fix:  {fix}")
        self.refusal = Refusal(told, loss, grad_norm, policy == "rollback")

    def _limit(self, name: str) -> float:
        numbers = self._memory().get(name, [])
        if len(numbers) < max(2, self.options.loss_spike_window // 2):
            return FINITE
        return fmean(numbers) + self.options.loss_spike_sigma * pstdev(numbers)
