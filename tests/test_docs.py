"""Files and names that the documentation tells of are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
OTHERS = {"tools/preprocess_data.py"}
"""Paths of other projects, that migration.md names."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"\b(?:toolkit|tools|tests|benchmarks)/[\w/.]+\.(?:py|sh|md)\b", page.read_text()))
    assert [path for path in sorted(named - OTHERS) if not (ROOT / path).exists()] == []


def _rows() -> list[tuple[str, str]]:
    """Each file of the tables in extending.md with a name that is said to be in it."""
    rows = []
    for line in (ROOT / "docs" / "extending.md").read_text().splitlines():
        if line.startswith("|") and (found := re.search(r"`((?:toolkit|tests)/[\w/.]+\.py)`", line)):
            names = re.findall(r"`@?([A-Za-z_]+)(?:\(\))?`", line.rsplit("|", 2)[1])
            rows += [(found[1], name) for name in names if name != "FILES"]
    return rows


@pytest.mark.parametrize(("path", "name"), _rows())
def test_what_extending_names_is_in_its_file(path: str, name: str) -> None:
    assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{name} is not in {path}"
