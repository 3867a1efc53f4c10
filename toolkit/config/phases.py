"""Phases of a run: ``[phases.NAME]`` changes the sequence length, the batch or the mixture from a step on.

Each phase is a configuration of its own, with the values of the phase in the tables where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from toolkit.config.types import (
    AutoOrBatchSize,
    BatchSize,
    Degree,
    NonNegative,
    NonNegativeFloat,
    PositiveFloat,
    Size,
    Table,
)

if TYPE_CHECKING:
    from toolkit.config.schema import Config


class Phase(Table):
    """A part of the run with other lengths, batches or mixture, under a name of your choice, until the next
    phase. A key at None keeps the run's value."""

    start_step: NonNegative = 0
    """Finished steps after which the phase begins, at least 1 and below training.steps."""
    seq_len: Size | None = None
    """training.seq_len in this phase."""
    global_batch_size: AutoOrBatchSize | None = None
    """training.global_batch_size in this phase."""
    local_batch_size: BatchSize | None = None
    """training.local_batch_size in this phase."""
    context_parallel_degree: Degree | None = None
    """parallelism.context_parallel_degree in this phase."""
    rope_theta: PositiveFloat | None = None
    """model.rope_theta in this phase."""
    rope_scaling_factor: Annotated[float, Ge(1)] | None = None
    """model.rope_scaling_factor in this phase."""
    weights: dict[str, NonNegativeFloat] = {}
    """Weights of corpora of [data.mixture] in this phase; 0 draws nothing from a corpus."""

    def values(self) -> dict[str, tuple[str, Any]]:
        """Return the values that the phase sets, by dotted key, each with the key of the phase."""
        tables = {"rope_theta": "model", "rope_scaling_factor": "model"}
        tables["context_parallel_degree"] = "parallelism"
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"{tables.get(name, 'training')}.{name}": (name, value)
            for name, value in given.items()
            if value is not None and name not in ("start_step", "weights")
        } | {f"data.mixture.{name}.weight": ("weights", weight) for name, weight in self.weights.items()}


@dataclass(frozen=True)
class RunPhase:
    """One phase of a run: the steps after ``start`` up to ``end``, with ``config``. The first phase, of the
    run's own tables, is named "". ``previous`` is the name of the phase before."""

    name: str
    previous: str | None
    start: int
    end: int
    config: Config


def run_phases(config: Config) -> list[RunPhase]:
    """Return the phases of a valid ``config`` in order; the first one has no changes."""
    named = sorted(config.phases.items(), key=lambda item: item[1].start_step)
    names, starts = ["", *dict(named)], [0, *(phase.start_step for _, phase in named)]
    ends = [*starts[1:], config.training.steps]
    return [
        RunPhase(name, previous, start, end, config.in_phase(name))
        for name, previous, start, end in zip(names, [None, *names], starts, ends, strict=False)
    ]


def phase_after(config: Config, step: int) -> RunPhase:
    """Return the phase of the step after ``step`` finished steps."""
    return [phase for phase in run_phases(config) if phase.start <= step][-1]


def replaced(table: Table | Mapping[str, Any], path: list[str], value: object) -> Any:
    """Return a copy of a table with another value at ``path``."""
    name, *rest = path
    if rest:
        inner = table[name] if isinstance(table, Mapping) else getattr(table, name)
        value = replaced(inner, rest, value)
    return {**table, name: value} if isinstance(table, Mapping) else table.model_copy(update={name: value})
