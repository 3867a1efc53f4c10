"""Reports from the ranks of a broken run, and the rank at fault derived from them.

When a rank dies or hangs, the other ranks see a collective fail, each in a different group: one waits for a
neighbor in the pipeline, which waits for its tensor-parallel peer, which hangs. Therefore each rank reports
where it is, and only all reports together show which rank is missing, busy or behind. Reports are files next
to the traces of collectives. The group's store is not used, because it lives in rank 0, which may be the rank
that hangs. Launchers read them without torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import first_few

if TYPE_CHECKING:
    from toolkit.config.job import Comm, Job

WHOLE = ("default_pg", "mesh_default")
TOLD = 8  # maximum number of waiting ranks to list
POLL_SECONDS = 0.2


def traces_prefix(job: Job, comm: Comm) -> Path:
    """Return the path prefix of the files in which ranks report failed collectives."""
    from toolkit.config.local_paths import expand_user  # deferred: reading reports needs no package

    folder = expand_user(comm.save_traces_folder, inside=expand_user(job.dump_folder))
    return folder / comm.save_traces_file_prefix


@dataclass(frozen=True)
class Place:
    """Position of a rank in one group: its first unfinished collective, else its last one.

    ``number`` counts the group's collectives; 0 means none yet, or a transfer between two ranks.
    """

    group: str
    ranks: tuple[int, ...]
    number: int = 0
    operation: str = ""
    done: bool = field(default=False, compare=False)  # either value is possible after a timed-out wait

    @property
    def name(self) -> str:
        """Mesh dimension of the group, or "" if it is not a mesh group."""
        return self.group.removeprefix("mesh_") if self.group.startswith("mesh_") else ""

    @property
    def name_and_ranks(self) -> tuple[str, tuple[int, ...]]:
        return self.group, self.ranks

    def __str__(self) -> str:
        number = f" number {self.number}" if self.number else ""
        ranks = first_few([str(rank) for rank in self.ranks], TOLD)
        group = "all ranks" if self.group in WHOLE else f"the group {self.name or self.group} (ranks {ranks})"
        return f"{self.operation}{number} of {group}"


@dataclass(frozen=True)
class Report:
    """State of one rank: its ``step``, ``where`` it is in the code, its ``places`` in all groups, and whether
    it ``waits``; if so, in which ``place``, if known, and for how many ``seconds`` (0: unknown)."""

    rank: int
    step: int
    where: str
    waits: bool
    place: Place | None
    seconds: float
    places: tuple[Place, ...]

    @property
    def in_collective(self) -> bool:
        return self.place is not None and self.place.number > 0


def _path(prefix: Path, rank: int) -> Path:
    return prefix.with_name(f"{prefix.name}{rank}.report.json")


def forget(prefix: Path, rank: int) -> None:
    """Remove this rank's report of an earlier run."""
    with suppress(OSError):
        _path(prefix, rank).unlink(missing_ok=True)


def write(prefix: Path, report: Report) -> None:
    """Write the report atomically, for other processes to read.

    Raises:
        OSError: the folder is not writable.
    """
    path = _path(prefix, report.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    partial.rename(path)


def _place(values: dict) -> Place:
    return Place(**{**values, "ranks": tuple(values["ranks"])})


def _read(prefix: Path, rank: int) -> Report | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(_path(prefix, rank).read_text(encoding="utf-8"))
        place = _place(values["place"]) if values["place"] else None
        places = tuple(_place(place) for place in values["places"])
        return Report(**{**values, "place": place, "places": places})
    return None


def gather(prefix: Path, world_size: int, *, seconds: float = 0.0) -> dict[int, Report]:
    """Return the reports of all ranks, in order, or those that exist after ``seconds``."""
    deadline = time.monotonic() + seconds
    reports: dict[int, Report] = {}
    while True:
        for rank in range(world_size):
            report = None if rank in reports else _read(prefix, rank)
            if report:
                reports[rank] = report
        left = deadline - time.monotonic()
        if len(reports) == world_size or left <= 0:
            return dict(sorted(reports.items()))
        time.sleep(min(POLL_SECONDS, left))


def first(prefix: Path, world_size: int) -> int:
    """Return the lowest rank that has reported, or ``world_size`` if none has."""
    return next((rank for rank in range(world_size) if _path(prefix, rank).exists()), world_size)


def at_fault(reports: Mapping[int, Report], world_size: int) -> list[int]:
    """Return the ranks that the others wait for: ranks without a report, else ranks that are not waiting,
    else ranks that are behind in a group in which others wait."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    busy = [rank for rank, report in reports.items() if not report.waits]
    return silent or busy or _behind(reports)


def _behind(reports: Mapping[int, Report]) -> list[int]:
    wanted: dict[tuple[str, tuple[int, ...]], int] = {}
    for report in reports.values():
        if report.waits and report.place:
            key = report.place.name_and_ranks
            wanted[key] = max(report.place.number, wanted.get(key, 0))
    return [
        rank
        for rank, report in reports.items()
        if any(place.number < wanted.get(place.name_and_ranks, 0) for place in report.places)
    ]


def _waiting_for(rank: int, reports: Mapping[int, Report]) -> list[Report]:
    """Return the reports of ranks known to wait in a collective that ``rank`` has not reached."""
    own = reports.get(rank)
    return [
        other
        for other in reports.values()
        if other.waits and other.place and rank in other.place.ranks and rank != other.rank
        if own is None or not own.waits or _is_before(own, other.place)
    ]


def _is_before(report: Report, wanted: Place) -> bool:
    """Return whether the rank has yet to reach ``wanted``; False for a transfer (number 0), because it is
    unknown which of its ranks waits for the other."""
    return any(
        place.name_and_ranks == wanted.name_and_ranks and place.number < wanted.number
        for place in report.places
    )


def _coordinates(rank: int, reports: Mapping[int, Report]) -> str:
    """Return the rank's mesh coordinates, derived from groups that it shares with reporting ranks."""
    places = {place for report in reports.values() for place in report.places if rank in place.ranks}
    found = {
        place.name: place.ranks.index(rank) for place in places if place.name and place.group not in WHOLE
    }
    return ", ".join(f"{name} {index}" for name, index in sorted(found.items()))


def _ranks(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {first_few([str(rank) for rank in ranks], TOLD)}"


def _tell_rank(rank: int, reports: Mapping[int, Report], known: Mapping[int, str]) -> str:
    coordinates, report = _coordinates(rank, reports), reports.get(rank)
    said = f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"
    # A transfer is less informative than a collective.
    waiting = sorted(_waiting_for(rank, reports), key=lambda other: (other.in_collective, other.seconds))
    if waiting:
        other = waiting[-1]
        alike = sorted(one.rank for one in waiting if one.place == other.place)
        said += f" did not take part in {other.place}, for which {_ranks(alike)} waited{_time(other)},"
        said += f" in step {other.step}"
    if report:
        return f"{said}; it was in step {report.step}, {report.where}"
    return f"{said}; it {known.get(rank, 'has not said where it is')}"


def _time(report: Report) -> str:
    return f" {report.seconds:.0f} s" if report.seconds else ""


def tell(reports: Mapping[int, Report], world_size: int, known: Mapping[int, str], *, more: Path) -> str:
    """Describe which ranks are at fault, and where the others waited.

    ``known`` describes ranks without a report, such as "is stopped"; ``more`` is the folder of the traces.
    """
    culprits = at_fault(reports, world_size)
    lines = [_tell_rank(rank, reports, known) for rank in culprits[:TOLD]]
    if not culprits:
        lines = ["the ranks waited for one another, and none is behind"]
    elif len(culprits) > TOLD:
        lines.append(f"and {len(culprits) - TOLD} more ranks")
    others = [reports[rank] for rank in reports.keys() - set(culprits)]
    others.sort(key=lambda report: report.rank)
    for report in others[:TOLD]:
        place = f" in {report.place}," if report.place else ""
        lines.append(f"  rank {report.rank} waited{_time(report)}{place} {report.where}")
    if len(others) > TOLD:
        lines.append(f"  and {len(others) - TOLD} more ranks")
    return "\n".join([*lines, f"  the last collectives of each rank are in {more}"])
