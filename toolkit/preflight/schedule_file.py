"""A pipeline schedule of the user's own, as torch reads it: a CSV file with the actions of one rank a line.

An action is a stage, what is computed, and a micro-batch: 2F0 is the forward of stage 2 on micro-batch 0.
B is a whole backward; I and W are its two halves, the gradients of inputs and of weights. An empty cell is
a wait. ``(0F5;7B0)OVERLAP_F_B`` are two that run at once. torch adds the communication itself.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ONE = re.compile(r"(\d+)([FBIW])(\d+)")
_AT_ONCE = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """``kind`` is F, B, I or W."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Malformed(Exception):
    """What is wrong with the file, and where."""


Rank = list[tuple[Action, ...]]
"""The actions of a rank in order, those together that run at once."""


@dataclass(frozen=True)
class ScheduleFile:
    """``ranks`` by number."""

    ranks: list[Rank]

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        return [sorted({action.stage for step in rank for action in step}) for rank in self.ranks]

    @property
    def micro_batches(self) -> int:
        return 1 + max(action.micro_batch for rank in self.ranks for step in rank for action in step)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind in "IW" for rank in self.ranks for step in rank for action in step)


def read_schedule(path: Path) -> ScheduleFile:
    """Read a file.

    Raises:
        Malformed: a cell is no action, or a rank has none.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        ranks = [_rank(row, number) for number, row in enumerate(csv.reader(file), start=1)]
    if not ranks:
        raise Malformed("it is empty")
    return ScheduleFile(ranks)


def _rank(row: list[str], line: int) -> Rank:
    rank = []
    for cell in (cell.strip() for cell in row):
        together = _AT_ONCE.fullmatch(cell)
        parts = together[1].split(";") if together else [cell] if cell else []
        found = [_ONE.fullmatch(part.strip()) for part in parts]
        if not all(found):
            raise Malformed(f"line {line}: {cell} is no action such as 2F0, 2B0, 2I0 or 2W0")
        if parts:
            rank.append(tuple(Action(int(m[1]), m[2], int(m[3])) for m in found if m))
    if not rank:
        raise Malformed(f"line {line} has no actions")
    return rank


def fault(schedule: ScheduleFile) -> str:
    """What keeps the schedule from computing each micro-batch in each stage once, or "" if nothing does.

    ``schedule`` has every stage on one rank.
    """
    last = max(stage for stages in schedule.stages_of_ranks for stage in stages)
    counts = Counter(action for rank in schedule.ranks for step in rank for action in step)
    for stage in range(last + 1):
        for micro_batch in range(schedule.micro_batches):
            times = {kind: counts[Action(stage, kind, micro_batch)] for kind in "FBIW"}
            if times["F"] != 1:
                return f"{stage}F{micro_batch} is there {times['F']} times, not once"
            if (times["B"], times["I"], times["W"]) not in ((1, 0, 0), (0, 1, 1)):
                return f"the backward of stage {stage} on micro-batch {micro_batch} is not there once"
    return _stuck(schedule, last)


def _stuck(schedule: ScheduleFile, last: int) -> str:
    """Run it: each rank takes its next step when what that needs is done."""
    done: set[Action] = set()
    left = [list(reversed(rank)) for rank in schedule.ranks]
    while any(left):
        ready = [rank for rank in left if rank and all(_can_run(action, done, last) for action in rank[-1])]
        if not ready:
            waiting = [f"rank {number} at {rank[-1][0]}" for number, rank in enumerate(left) if rank]
            return f"it cannot go on: {', '.join(waiting[:4])} wait for one another"
        for rank in ready:
            done.update(rank.pop())
    return ""


def _can_run(action: Action, done: set[Action], last: int) -> bool:
    stage, kind, micro_batch = action
    if kind == "F":
        return stage == 0 or Action(stage - 1, "F", micro_batch) in done
    if kind == "W":
        return Action(stage, "I", micro_batch) in done
    after = any(Action(stage + 1, other, micro_batch) in done for other in "BI")
    return Action(stage, "F", micro_batch) in done and (stage == last or after)
