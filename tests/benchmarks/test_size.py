"""benchmarks/size.py, and what it must not find: circles and climbs of imports."""

from __future__ import annotations

from benchmarks.size import circles, climbs, graph, report

KNOWN = [["toolkit.data.chat.base", "toolkit.models.registry"]]
"""First and last file of each circle that is left: tokenizers ask the families for the forms of their files,
and the families' chat formats are made from those of data."""


def test_no_circle_is_new() -> None:
    assert [[ring[0], ring[-1]] for ring in circles(graph())] == KNOWN


def test_nothing_climbs() -> None:
    assert climbs(graph()) == []


def test_circles_and_climbs_are_found() -> None:
    edges = {"toolkit.io.a": {"toolkit.trainer"}, "toolkit.trainer": {"toolkit.io.b"}}
    assert circles(edges) == [] and climbs(edges) == ["toolkit.io.a imports toolkit.trainer"]
    edges |= {"toolkit.io.b": {"toolkit.io.a"}}
    assert circles(edges) == [["toolkit.io.a", "toolkit.io.b", "toolkit.trainer"]]


def test_the_report_has_all_rooms() -> None:
    text = report()
    assert "| circles | 1 |" in text and "| planner/ |" in text and "| climbs | 0 |" in text
