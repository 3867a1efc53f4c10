"""Hooks that the trainer calls around each step: health checks, profiling and custom ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """Results of a global batch.

    Attributes:
        loss: mean loss per token in nats, or the objective's mean.
        grad_norm: gradient norm before clipping.
        tokens: number of valid labels.
        stop: True if any rank asked to stop after this step.
        reported: additional values of the objective and the blocks.
    """

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    reported: Mapping[str, float] = field(default_factory=dict)


class StepHook:
    """Base class of step hooks; every method is empty by default.

    A hook is entered before the first step and exited after the last, with the exception that ended the run,
    if any. Every rank calls the same hooks in the same order.
    """

    def __enter__(self) -> StepHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def before_step(self, step: int) -> None:
        """Called once the micro-batches of a step are loaded."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Called after the update, before anything is logged, validated or saved."""

    def during(self, name: str) -> AbstractContextManager[object]:
        """Return a context for work outside the step itself, such as "data", "validation" or "checkpoint"."""
        return nullcontext()

    def log_values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the ``values`` of a logged step, with the hook's values added."""
        return values
