"""Splitting of the model into pipeline stages, their assignment to ranks, and properties of schedules.
Imports no torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from toolkit.config.parallelism import Parallelism


@dataclass(frozen=True)
class Schedule:
    """The properties and requirements of a pipeline schedule.

    Attributes:
        stages: number of stages per rank, or the minimum if ``more`` are possible.
        v_shaped: rank r has the r-th stage from the start and the r-th from the end.
        split_backward: weight gradients are computed separately from input gradients.
        needs: requirement on the number of micro-batches: at least the number of "stages", or a multiple
            of the number of "rounds" of about one micro-batch per rank.
    """

    stages: int = 1
    more: bool = False
    v_shaped: bool = False
    split_backward: bool = False
    needs: Literal["", "stages", "rounds"] = ""

    def supports_stages(self, count: int, pp: int) -> bool:
        """Return whether the schedule supports ``count`` stages on ``pp`` ranks."""
        each, rest = divmod(count, pp)
        return rest == 0 and (each >= self.stages if self.more else each == self.stages)

    def supports_micro_batches(self, count: int, *, stages: int, pp: int) -> bool:
        """Return whether the schedule supports ``count`` micro-batches per step, for ``stages`` on ``pp``
        ranks."""
        if self.needs == "stages":
            return count >= stages
        return self.needs == "" or count % max(1, count // pp) == 0


SCHEDULES = {
    "GPipe": Schedule(),
    "1F1B": Schedule(needs="stages"),
    "Interleaved1F1B": Schedule(2, more=True, needs="rounds"),
    "LoopedBFS": Schedule(2, more=True),
    "InterleavedZeroBubble": Schedule(2, more=True, split_backward=True, needs="rounds"),
    "ZBVZeroBubble": Schedule(2, v_shaped=True, split_backward=True),
    "DualPipeV": Schedule(2, v_shaped=True, split_backward=True, needs="stages"),
}
"""torch's pipeline schedules by name."""

BASES = {"PipelineScheduleSingle": Schedule(), "PipelineScheduleMulti": Schedule(2, more=True)}
"""torch's base classes for schedules from a file, with one and with several stages per rank, by the names
that torchtitan accepts with ``pipeline_parallel_schedule_csv``."""


def schedule_of(parallelism: Parallelism) -> Schedule:
    """Return the schedule of ``parallelism``."""
    return (SCHEDULES | BASES)[parallelism.pipeline_parallel_schedule]


def may_split_backward(parallelism: Parallelism) -> bool:
    """Return whether the schedule, or one from a file, may split backward into input and weight gradients."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    return schedule_of(parallelism).split_backward or bool(parallelism.pipeline_parallel_schedule_csv)


def stage_count(
    n_layers: int,
    pp: int,
    schedule: Schedule,
    *,
    layers_per_stage: int | None,
    first_less: int,
    last_less: int,
) -> int:
    """Return the total number of stages. ``first_less`` and ``last_less`` are the cost of the embedding and
    of the head, in layers."""
    if layers_per_stage is None:
        return pp * schedule.stages
    return -(-(n_layers + first_less + last_less) // layers_per_stage)


def stage_modules(n_layers: int, stages: int, *, first_less: int, last_less: int) -> list[list[str]]:
    """Return the module names of each stage; layers are distributed evenly, and the first stages take the
    remainder.

    A stage may get only the embedding or the head; :func:`is_valid_split` checks the result.
    """
    share, rest = divmod(n_layers + first_less + last_less, stages)
    counts = [share + (stage < rest) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    modules, layer = [], 0
    for count in counts:
        modules.append([f"layers.{index}" for index in range(layer, layer + count)])
        layer += max(0, count)
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "output"]
    return modules


def stages_of_ranks(stages: int, pp: int, schedule: Schedule) -> list[list[int]]:
    """Return the stages of each rank, in order."""
    if schedule.v_shaped:
        return [[rank, stages - 1 - rank] for rank in range(pp)]
    return [list(range(rank, stages, pp)) for rank in range(pp)]


def module_names(n_layers: int) -> list[str]:
    """Return the names of all modules that a stage can contain, in forward order."""
    return ["tok_embeddings", *(f"layers.{index}" for index in range(n_layers)), "norm", "output"]


def is_valid_split(modules: list[list[str]], n_layers: int) -> bool:
    """Return whether every stage has a module and every module is in exactly one stage, in order."""
    return all(modules) and [name for stage in modules for name in stage] == module_names(n_layers)


@dataclass(frozen=True)
class Stages:
    """Module names of each stage (``modules``), and stages of each rank (``of_ranks``)."""

    modules: list[list[str]]
    of_ranks: list[list[int]]


@functools.lru_cache(maxsize=256)
def _even_stages(n_layers: int, stages: int, first_less: int, last_less: int) -> list[list[str]]:
    # Cached, because a layout search requests the same few thousands of times.
    return stage_modules(n_layers, stages, first_less=first_less, last_less=last_less)


def pipeline_stages(parallelism: Parallelism, n_layers: int) -> Stages:
    """Return the stages that ``parallelism`` configures, unchecked: the preflight validates them."""
    pp, schedule = parallelism.pipeline_parallel_degree, schedule_of(parallelism)
    ends = {
        "first_less": parallelism.pipeline_parallel_first_stage_less_layers,
        "last_less": parallelism.pipeline_parallel_last_stage_less_layers,
    }
    modules = parallelism.module_fqns_per_model_part
    if modules is None:
        per_stage = parallelism.pipeline_parallel_layers_per_stage
        count = stage_count(n_layers, pp, schedule, layers_per_stage=per_stage, **ends)
        modules = _even_stages(n_layers, count, *ends.values())
    return Stages(modules, stages_of_ranks(len(modules), pp, schedule))


def bubble(name: str, micro_batches: int, *, stages: int, pp: int) -> float:
    """Return the fraction of step time that ranks idle, assuming that forward, input gradients and weight
    gradients of a stage each take one unit of time, and communication takes none."""
    each, ends = stages // pp, pp - 1
    short = max(0, pp - micro_batches)
    work = 3 * each * micro_batches
    waits = {
        "GPipe": 3 * ends,
        "1F1B": 3 * ends,
        "Interleaved1F1B": 3 * (ends + (each - 1) * short),
        "LoopedBFS": 3 * (ends + (each - 1) * short),
        "InterleavedZeroBubble": max(ends + each * short, 2 * (each * pp + micro_batches) - 1 - work),
        "ZBVZeroBubble": max(ends, 4 * pp - 2 - 2 * micro_batches),
        "DualPipeV": 2 * ends,
    }[name]
    return waits / (waits + work)
