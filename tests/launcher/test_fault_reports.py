"""Who is at fault, from reports of ranks that wait for one another in nested groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from toolkit.launcher import fault_reports
from toolkit.launcher.fault_reports import Place, Report, at_fault, tell

# Four ranks, pp 2 × tp 2.
TP = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
PP = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def report(
    rank: int, where: str = "at train_step.py:1 (f)", *, tp: int = 7, of: str = "", waits: bool = True
) -> Report:
    """Report of a rank in number ``tp`` of its tp group, which waits in the group ``of``, if in any."""
    places = {
        "tp": Place("mesh_tp", TP[rank], tp, "all_reduce", done=of != "tp"),
        "pp": Place("mesh_pp", PP[rank], operation="a transfer"),
        "world": Place("default_pg", (0, 1, 2, 3), 3, "all_reduce", done=of != "world"),
    }
    return Report(rank, 5, where, waits, places.get(of), 5.0, tuple(places.values()))


def by_rank(*reports: Report) -> dict[int, Report]:
    return {report.rank: report for report in reports}


def told(reports: dict[int, Report], known: Mapping[int, str] = MappingProxyType({})) -> str:
    return tell(reports, 4, known, more=Path("traces"))


def test_who_is_silent_is_at_fault_not_who_waits_for_a_neighbour():
    reports = by_rank(report(0, of="pp"), report(1, of="pp"), report(2, tp=8, of="tp"))
    assert at_fault(reports, 4) == [3]
    first, *others, last = told(reports, {3: "is stopped"}).splitlines()
    assert first == (
        "rank 3 (pp 1, tp 1) did not take part in all_reduce number 8 of the group tp (ranks 2, 3), "
        "for which rank 2 waited 5 s, in step 5; it is stopped"
    )
    assert [line.split()[1] for line in others] == ["0", "1", "2"]
    assert "a transfer of the group pp (ranks 0, 2)" in others[0]
    assert last == "  the last collectives of each rank are in traces"


def test_who_answers_but_waits_for_nobody_is_at_fault():
    reports = by_rank(
        report(0, of="pp"),
        report(1, tp=8, of="tp"),
        report(2, of="pp"),
        report(3, of="pp"),
    ) | by_rank(report(0, "at data.py:9 (read)", waits=False))
    assert at_fault(reports, 4) == [0]
    first = told(reports).splitlines()[0]
    assert "did not take part in all_reduce number 8 of the group tp (ranks 0, 1), for which rank 1" in first
    assert first.endswith("it was in step 5, at data.py:9 (read)")


def test_who_is_behind_in_a_shared_group_is_at_fault_when_all_wait():
    # Rank 2 skipped a collective of tp and waits in the next one of the world.
    reports = by_rank(*(report(rank, of="world") for rank in (0, 1, 2)), report(3, tp=8, of="tp"))
    assert at_fault(reports, 4) == [2]
    assert "rank 2 (pp 1, tp 0) did not take part in all_reduce number 8 of the group tp" in told(reports)


def test_all_that_waited_are_named_though_one_says_that_its_wait_is_done():
    reports = by_rank(*(report(rank, of="world") for rank in range(3)))
    done = replace(reports[1], place=Place("default_pg", (0, 1, 2, 3), 3, "all_reduce", done=True))
    assert "for which ranks 0, 1, 2 waited" in told(reports | {1: done})


def test_ranks_that_wait_alike_accuse_nobody():
    reports = by_rank(*(report(rank, of="world") for rank in range(4)))
    assert at_fault(reports, 4) == []
    assert "none is behind" in told(reports)


def test_a_thousand_ranks_are_told_in_a_few_lines():
    everyone = tuple(range(1000))
    place = Place("default_pg", everyone, 3, "all_reduce")
    reports = {rank: Report(rank, 5, "", True, place, 5.0, (place,)) for rank in everyone[:-20]}
    said = tell(reports, 1000, {}, more=Path("traces"))
    assert said.startswith("rank 980 did not take part in all_reduce number 3 of all ranks")
    assert "and 12 more ranks" in said and "and 972 more ranks" in said
    assert len(said) < 5000


def test_reports_are_found_again_whole_and_only_of_this_run(tmp_path: Path):
    prefix = tmp_path / "comm_traces" / "rank_"
    reports = [report(0, of="tp"), report(2, of="world")]
    for one in reports:
        fault_reports.write(prefix, one)
    (tmp_path / "comm_traces" / "rank_1.report.json").write_text("{")  # a disk that is full
    (tmp_path / "comm_traces" / "rank_3.report.json").write_text("{}")  # of another version
    assert fault_reports.gather(prefix, 4) == by_rank(*reports)
    assert fault_reports.first(prefix, 4) == 0
    for rank in (0, 1, 3, 4):  # the last of which has left none
        fault_reports.forget(prefix, rank)
    assert list(fault_reports.gather(prefix, 4)) == [2]
    assert (fault_reports.first(prefix, 4), fault_reports.first(prefix, 2)) == (2, 2)
