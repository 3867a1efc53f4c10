"""Hooks of a step, which a trainer calls around each: health, profiling, and what is added to its list."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """Results of a global batch: ``loss`` is the mean per token in nats, or the objective's, ``tokens`` how
    many labels counted, ``stop`` whether any rank asked to stop after this step, ``reported`` what objective
    and blocks report beside the loss."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool
    reported: Mapping[str, float] = field(default_factory=dict)


class StepHook:
    """Does nothing; a hook overrides what it needs. It is entered before the first step and exited after the
    last one, with what the run has failed of. Every rank calls the same hooks in the same order."""

    def __enter__(self) -> StepHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def before_step(self, step: int) -> None:
        """Called when the micro-batches are there."""

    def after_step(self, step: int, result: StepResult) -> None:
        """Called after the update, before anything is logged, validated or saved."""

    def during(self, name: str) -> AbstractContextManager[object]:
        """Around what is no training: "data", "validation", "checkpoint" and others."""
        return nullcontext()

    def logged(self, values: dict[str, Any]) -> dict[str, Any]:
        """The ``values`` of a logged step, and what the hook adds to them."""
        return values
