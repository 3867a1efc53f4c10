"""benchmarks/size.py, and what it must not find: circles and climbs of imports."""

from __future__ import annotations

from benchmarks.size import circles, climbs, graph, report


def test_there_are_no_circles() -> None:
    assert circles(graph()) == []


def test_nothing_climbs() -> None:
    assert climbs(graph()) == []


def test_circles_and_climbs_are_found() -> None:
    edges = {"toolkit.io.a": {"toolkit.trainer"}, "toolkit.trainer": {"toolkit.io.b"}}
    assert circles(edges) == [] and climbs(edges) == ["toolkit.io.a imports toolkit.trainer"]
    edges |= {"toolkit.io.b": {"toolkit.io.a"}}
    assert circles(edges) == [["toolkit.io.a", "toolkit.io.b", "toolkit.trainer"]]


def test_the_report_has_all_rooms() -> None:
    text = report()
    assert "| circles | 0 |" in text and "| planner/ |" in text and "| climbs | 0 |" in text
