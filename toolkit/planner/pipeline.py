"""The actions of a pipeline's schedule, and when each rank does them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.compat import schedule_actions
from toolkit.parallel.pipeline_schedules import SCHEDULES, stages_of_ranks

Action = tuple[str, int, int]
"""Forward "F", backward "B" or its halves for inputs "I" and for weights "W", of a stage and micro-batch."""


@dataclass(frozen=True)
class Timeline:
    """``seconds`` until the last rank is done; ``actions`` of each rank with their begin and end; ``waits``,
    the mean of the ranks' seconds until their first parameters are gathered and after their last action,
    until gradients are reduced."""

    seconds: float
    waits: float
    actions: list[list[tuple[Action, float, float]]]

    @property
    def busy(self) -> list[float]:
        """Seconds that each rank computes."""
        return [sum(end - begin for _, begin, end in each) for each in self.actions]


@functools.lru_cache(maxsize=256)
def orders(schedule: str, pp: int, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in order, as torch has them."""
    ends = range(pp)
    if schedule in ("GPipe", "1F1B"):
        ahead = [micro_batches if schedule == "GPipe" else min(micro_batches, pp - rank) for rank in ends]
        return tuple(_single(rank, ahead[rank], micro_batches) for rank in ends)
    from torch.distributed.pipelining.schedules import get_schedule_class

    actions = schedule_actions(get_schedule_class(schedule), pp, stages, micro_batches)
    return tuple(map(_flat, actions))


def _single(rank: int, ahead: int, count: int) -> tuple[Action, ...]:
    found: list[Action] = [("F", rank, index) for index in range(ahead)]
    for index in range(count - ahead):
        found += [("B", rank, index), ("F", rank, ahead + index)]
    return (*found, *(("B", rank, index) for index in range(count - ahead, count)))


def _flat(actions: Sequence[Any]) -> tuple[Action, ...]:
    found: list[Action] = []
    for each in actions:
        if each is None:
            continue
        if each.sub_actions:
            found += _flat(each.sub_actions)
        else:
            found.append((each.computation_type.value, each.stage_index, each.microbatch_index))
    return tuple(found)


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
    """When each rank does what: ``forward`` and ``backward`` are the seconds of each stage; a half of a
    backward takes half.

    Once a step, beside computation, a rank gathers its stages one after the other, in the order in which it
    first needs them, and reduces each after its last backward; ``units`` are the parts in which each does. A
    ``transfer`` takes hidden states from rank to rank, beside computation too.
    """
    stages = len(forward)
    gather, reduce, units = gather or [0.0] * stages, reduce or [0.0] * stages, units or [1] * stages
    held = stages_of_ranks(stages, pp, SCHEDULES[schedule])
    owner = {stage: rank for rank, each in enumerate(held) for stage in each}
    order = orders(schedule, pp, stages, micro_batches)
    lengths = {"F": forward, "B": backward, **dict.fromkeys("IW", [it / 2 for it in backward])}
    gathered = dict[int, float]()
    for actions in order:
        clock = 0.0
        for stage in dict.fromkeys(stage for _, stage, _ in actions):
            gathered[stage] = clock = clock + gather[stage]
    left = [micro_batches] * stages  # backwards that are still to come
    ended: dict[tuple[bool, int, int], float] = {}  # forwards, and gradients of inputs
    clocks, reduced, places = [0.0] * pp, [0.0] * pp, [0] * pp
    done: list[list[tuple[Action, float, float]]] = [[] for _ in range(pp)]
    moving = True
    while moving:
        moving = False
        for rank in range(pp):
            actions, clock, log = order[rank], clocks[rank], done[rank]
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
                        whole, last = max(reduced[rank], begin) + reduce[stage], reduce[stage] / units[stage]
                        reduced[rank] = max(whole, clock + last)
                log.append((action, begin, clock))
                places[rank] = place + 1
                moving = True
            clocks[rank] = clock
    assert all(places[rank] == len(order[rank]) for rank in range(pp)), "a schedule that waits for ever"
    first = [gather[actions[0][1]] / units[actions[0][1]] for actions in order]
    after = [max(0.0, it - clock) for it, clock in zip(reduced, clocks, strict=True)]
    return Timeline(max([*clocks, *reduced]), sum(first + after) / pp, done)
