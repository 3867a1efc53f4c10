"""How a pipeline cuts the model into stages and hands them to ranks, and how its schedule fills a step:
arithmetic, without torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from toolkit.config.parallelism import Parallelism


@dataclass(frozen=True)
class Schedule:
    """``stages`` a rank needs: just as many, or at least as many where ``more`` are possible. ``v_shaped``
    gives a rank the r-th and the r-th stage from the end. ``split_backward`` computes the gradients of
    weights apart from those of inputs. ``needs`` is what it asks of the number of micro-batches: at least
    as many as all "stages", or equally many in each of the "rounds" of about one a rank."""

    stages: int = 1
    more: bool = False
    v_shaped: bool = False
    split_backward: bool = False
    needs: Literal["", "stages", "rounds"] = ""

    def takes_stages(self, count: int, pp: int) -> bool:
        """Say if it runs ``count`` stages on ``pp`` ranks."""
        each, rest = divmod(count, pp)
        return rest == 0 and (each >= self.stages if self.more else each == self.stages)

    def takes_micro_batches(self, count: int, *, stages: int, pp: int) -> bool:
        """Say if it runs ``count`` micro-batches a step through ``stages`` on ``pp`` ranks."""
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
"""torch's bases of schedules with one stage a rank and with several, which a file fills: torchtitan's names
beside ``pipeline_parallel_schedule_csv``."""


def schedule_of(parallelism: Parallelism) -> Schedule:
    """The schedule that ``parallelism`` names."""
    return (SCHEDULES | BASES)[parallelism.pipeline_parallel_schedule]


def may_split_backward(parallelism: Parallelism) -> bool:
    """Say if a backward may be computed in two halves; a schedule from a file may."""
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
    """Stages of all ``pp`` ranks. The embedding is ``first_less`` layers, the head ``last_less``."""
    if layers_per_stage is None:
        return pp * schedule.stages
    return -(-(n_layers + first_less + last_less) // layers_per_stage)


def stage_modules(n_layers: int, stages: int, *, first_less: int, last_less: int) -> list[list[str]]:
    """Names of each stage's modules, the layers spread as evenly as they can be, the rest of the division
    on the first stages. The embedding or the head may come out alone; :func:`is_cut` says whether it fits."""
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
    """The stages of each rank, in order."""
    if schedule.v_shaped:
        return [[rank, stages - 1 - rank] for rank in range(pp)]
    return [list(range(rank, stages, pp)) for rank in range(pp)]


def module_names(n_layers: int) -> list[str]:
    """Every module that a stage can hold, in forward order."""
    return ["tok_embeddings", *(f"layers.{index}" for index in range(n_layers)), "norm", "output"]


def is_cut(modules: list[list[str]], n_layers: int) -> bool:
    """Check that stages of these modules hold something each, and together every module once, in order."""
    return all(modules) and [name for part in modules for name in part] == module_names(n_layers)


@dataclass(frozen=True)
class Stages:
    """``modules`` are the names of each stage's modules, ``of_ranks`` the stages of each rank."""

    modules: list[list[str]]
    of_ranks: list[list[int]]


@functools.lru_cache(maxsize=256)
def _even_stages(n_layers: int, stages: int, first_less: int, last_less: int) -> list[list[str]]:
    # A search for a layout asks thousands of times for the same few.
    return stage_modules(n_layers, stages, first_less=first_less, last_less=last_less)


def pipeline_stages(parallelism: Parallelism, n_layers: int) -> Stages:
    """The stages that ``parallelism`` asks for, right or wrong: the preflight checks them."""
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
    """The part of a step that ranks wait for one another, if forward, gradients of inputs and gradients of
    weights of each stage take one unit of time each and communication none."""
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
