"""Simulate a pipeline schedule: the actions of each rank and their times."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.compat import schedule_actions
from toolkit.parallel.pipeline_schedules import SCHEDULES, stages_of_ranks

Action = tuple[str, int, int]
"""Kind, stage and micro-batch: forward "F", backward "B", or its halves for inputs "I" and weights "W"."""


@dataclass(frozen=True)
class Timeline:
    """Times of a schedule.

    Attributes:
        seconds: time until the last rank finishes.
        waits: mean over ranks of the time until the first parameters are gathered, and of the time from
            the last action until all gradients are reduced.
        actions: actions of each rank, with begin and end.
    """

    seconds: float
    waits: float
    actions: list[list[tuple[Action, float, float]]]

    @property
    def busy(self) -> list[float]:
        """Return the seconds of computation on each rank."""
        return [sum(end - begin for _, begin, end in each) for each in self.actions]


@functools.lru_cache(maxsize=256)
def orders(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank in torch's order."""
    ranks = range(pp)
    if schedule in ("GPipe", "1F1B"):
        ahead = [micro_batches if schedule == "GPipe" else min(micro_batches, pp - rank) for rank in ranks]
        return tuple(_one_stage_actions(rank, ahead[rank], micro_batches) for rank in ranks)
    from torch.distributed.pipelining.schedules import get_schedule_class

    actions = schedule_actions(get_schedule_class(schedule), pp, stages, micro_batches)
    return tuple(map(_flatten, actions))


def _one_stage_actions(rank: int, ahead: int, count: int) -> tuple[Action, ...]:
    actions: list[Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(count - ahead):
        actions += [("B", rank, index), ("F", rank, ahead + index)]
    return (*actions, *(("B", rank, index) for index in range(count - ahead, count)))


def _flatten(actions: Sequence[Any]) -> tuple[Action, ...]:
    flat: list[Action] = []
    for each in actions:
        if each is None:
            continue
        if each.sub_actions:
            flat += _flatten(each.sub_actions)
        else:
            flat.append((each.computation_type.value, each.stage_index, each.microbatch_index))
    return tuple(flat)


def simulate(
    schedule: str,
    pp: int,
    micro_batches: int,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    gather: Sequence[float] | None = None,
    reduce: Sequence[float] | None = None,
    units: Sequence[int] | None = None,
    transfer: float = 0.0,
) -> Timeline:
    """Simulate a step, given the seconds of each stage's ``forward`` and ``backward``; each half of a split
    backward takes half.

    A rank gathers its stages once per step, in the order of first use, and reduces each after its last
    backward, in ``units`` collectives each. These collectives, and each ``transfer`` of hidden states between
    ranks, overlap with computation.
    """
    stages = len(forward)
    gather, reduce, units = gather or [0.0] * stages, reduce or [0.0] * stages, units or [1] * stages
    by_rank = stages_of_ranks(stages, pp, SCHEDULES[schedule])
    owner = {stage: rank for rank, each in enumerate(by_rank) for stage in each}
    order = orders(schedule, pp, stages, micro_batches)
    lengths = {"F": forward, "B": backward, **dict.fromkeys("IW", [it / 2 for it in backward])}
    gathered = dict[int, float]()
    for actions in order:
        clock = 0.0
        for stage in dict.fromkeys(stage for _, stage, _ in actions):
            gathered[stage] = clock = clock + gather[stage]
    left = [micro_batches] * stages  # number of remaining backwards
    ended: dict[tuple[bool, int, int], float] = {}  # (is forward, stage, micro-batch) → end
    clocks, reduced, places = [0.0] * pp, [0.0] * pp, [0] * pp
    logs: list[list[tuple[Action, float, float]]] = [[] for _ in range(pp)]
    moving = True
    while moving:
        moving = False
        for rank in range(pp):
            actions, clock, log = order[rank], clocks[rank], logs[rank]
            for place in range(places[rank], len(actions)):
                kind, stage, index = action = actions[place]
                forwards = kind == "F"
                before = stage - 1 if forwards else stage + 1
                begin = clock
                if kind != "W" and 0 <= before < stages:
                    ready = ended.get((forwards, before, index))
                    if ready is None:
                        break
                    begin = max(clock, ready + (transfer if owner[before] != rank else 0.0))
                clock = begin + lengths[kind][stage]
                if forwards and stage in gathered:
                    clock = max(clock, gathered.pop(stage) + forward[stage] / units[stage])
                if kind != "W":
                    ended[forwards, stage, index] = clock
                if kind in "BW":
                    left[stage] -= 1
                    if left[stage] == 0:
                        end, last = max(reduced[rank], begin) + reduce[stage], reduce[stage] / units[stage]
                        reduced[rank] = max(end, clock + last)
                log.append((action, begin, clock))
                places[rank] = place + 1
                moving = True
            clocks[rank] = clock
    assert all(places[rank] == len(order[rank]) for rank in range(pp)), "the schedule deadlocks"
    first = [gather[actions[0][1]] / units[actions[0][1]] for actions in order]
    after = [max(0.0, it - clock) for it, clock in zip(reduced, clocks, strict=True)]
    return Timeline(max([*clocks, *reduced]), sum(first + after) / pp, logs)
