"""The phases of a run, each as a configuration with the values of ``[phases.NAME]`` where they belong."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.schema import Config


@dataclass(frozen=True)
class RunPhase:
    """The steps after ``start`` up to ``end``, with ``config``, and the name of the phase before. The first
    phase, of the run's own tables, is named ""."""

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
