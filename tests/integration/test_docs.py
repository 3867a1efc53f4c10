"""Files and names that the documentation tells of are there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from pydantic import ValidationError

from toolkit.compat import tomllib
from toolkit.config import Config
from toolkit.config.schema import fields_by_key, find_table, tables

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
OTHERS = {"tools/preprocess_data.py"}
"""Paths of other projects, that migration.md names."""
THEIRS = {"fsdp_sharding_strategy", "lr_scheduler", "offload_to_cpu", "ssd_offload"}
"""Names of other libraries in its column of ours."""
PLACEHOLDERS = {"table.key"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"<!-- .*? -->", "", page.read_text())  # marks of results, which a command is yet to make
    named = set(re.findall(r"\b(?:toolkit|tools|tests|benchmarks)/[\w/.]+\.(?:py|sh|md)\b", text))
    assert [path for path in sorted(named - OTHERS) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"-m ((?:toolkit|tools|benchmarks)(?:\.\w+)+)", page.read_text()))
    places = [ROOT / name.replace(".", "/") for name in sorted(named)]
    assert [place for place in places if not (place.with_suffix(".py").exists() or place.is_dir())] == []


def test_tables_between_marks_are_those_of_the_results() -> None:
    """A command of benchmarks writes both, of several tables the first; where it has not run yet, nothing
    stands between the marks."""
    found, wrong = 0, []
    for page in PAGES:
        marks = re.findall(
            r"<!-- (benchmarks/results/\S+\.md) -->\n(.*?)<!-- end -->", page.read_text(), re.S
        )
        for path, shown in marks:
            found += 1
            text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
            rest = dropwhile(lambda line: not line.startswith("|"), text.splitlines())
            table = list(takewhile(lambda line: line.startswith("|"), rest))
            if [line for line in shown.splitlines() if line.startswith("|")] != table:
                wrong.append(f"{page.name}: {path}")
    assert found and wrong == []


def _anchors(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in _anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    flags = re.findall(r"(?<!\S)--(\w+\.[\w.-]+)", text)
    named = {flag.replace("-", "_") for flag in flags} | {name for name in _ours(text) if "." in name}
    begins = {table.partition(".")[0] for table in tables()}
    keys = [name for name in sorted(named - PLACEHOLDERS) if name.partition(".")[0] in begins]
    assert [
        key for key in keys if not _is_key(key) and not key.endswith((".json", ".jsonl", ".safetensors"))
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_values_that_a_page_gives_keys_are_allowed(page: Path) -> None:
    wrong = []
    for key, text in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+) = ([^`]+)`", page.read_text()):
        with contextlib.suppress(tomllib.TOMLDecodeError):  # N for a number, … for more
            value = tomllib.loads(f"value = {text}")["value"]
            try:
                _validate(key, value)
            except ValidationError:
                wrong.append(f"{key} = {text}")
    assert wrong == []


def _validate(key: str, value: object) -> None:
    """Raise what the schema has against a value."""
    for part in reversed(key.split(".")):
        value = {part: value}
    Config.model_validate(value)


def test_a_key_that_migration_names_without_its_table_is_in_that_of_the_one_before() -> None:
    lost = []
    for line in (ROOT / "docs" / "migration.md").read_text().splitlines():
        table = ""
        for name in _ours(line) if line.startswith("|") else ():
            if name in fields_by_key():
                table = name.rpartition(".")[0]
            elif "_" in name and "." not in name and f"{table}.{name}" not in fields_by_key():
                lost.append(name)
    assert sorted(set(lost) - THEIRS) == []


def _ours(text: str) -> Iterator[str]:
    """Names in backticks, those of a table's last column only; its others are other libraries'."""
    for line in text.splitlines():
        ours = line.rstrip(" |").rpartition("|")[2] if line.startswith("|") else line
        for code in re.findall(r"`([^`]+)`", ours):
            if name := re.match(r"([a-z_]+(?:\.[a-z_0-9]+)*)(?: = .*)?$", code):
                yield name[1]


def _is_key(key: str) -> bool:
    table, _, name = key.rpartition(".")
    unset = f"{table}.{name.removeprefix('no_')}"
    return key in fields_by_key() or unset in fields_by_key() or find_table(key) is not None


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
