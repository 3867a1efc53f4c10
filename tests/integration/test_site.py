"""The documentation site builds without a warning, its links hold, and its reference is complete."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import toolkit
from toolkit.commands import COMMANDS
from toolkit.config.schema import fields, tables
from toolkit.config.unsupported import UNSUPPORTED

ROOT = Path(__file__).parents[2]


class _Page(HTMLParser):
    """Links, headings and text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.text = ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name == "id" and value:
                self.ids.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, _Page]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return {file: _Page(file) for file in folder.rglob("*.html") if file.name != "404.html"}


def _page(site: dict[Path, _Page], path: str) -> _Page:
    (found,) = [page for file, page in site.items() if file.as_posix().endswith(f"/{path}/index.html")]
    return found


def test_every_key_and_table_has_an_entry(site: dict[Path, _Page]) -> None:
    names = {*(field.key for field in fields()), *tables()}
    for group in {name.partition(".")[0] for name in names}:
        page = _page(site, f"reference/config/{group}")
        assert {name for name in names if f"{name}.".startswith(f"{group}.")} - page.ids == set()
    assert [key for key in UNSUPPORTED if key not in _page(site, "reference/config/unsupported").text] == []


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("training.seq_len", "int, default 2048, at least 1"),
        ("debug.seed", "int | None, default None, at least 0"),
        ("job.time_limit", "float | None, default None, above 0"),
        ("checkpoint.async_mode", 'disabled | async | async_with_pinned_mem, default "disabled"'),
    ],
)
def test_an_entry_states_type_default_and_bounds(site: dict[Path, _Page], key: str, facts: str) -> None:
    entry = _page(site, f"reference/config/{key.partition('.')[0]}").text.rpartition(f"\n{key}")[2]
    (field,) = [field for field in fields() if field.key == key]
    assert facts in entry.partition("\n\n")[0]
    assert field.description.split(",")[0].split(":")[0] in entry


def test_every_command_and_name_of_the_api_has_an_entry(site: dict[Path, _Page]) -> None:
    commands = _page(site, "reference/commands")
    assert set(COMMANDS) - commands.ids == set()
    assert commands.text.count("usage: llama-toolkit") >= len(COMMANDS)
    assert set(toolkit.__all__) - _page(site, "reference/python").ids == set()


def _broken(site: dict[Path, _Page]) -> Iterator[str]:
    for file, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in site and anchor not in site[target].ids):
                yield f"{file}: {link}"


def test_links_hold_in_the_text_and_in_the_navigation(site: dict[Path, _Page]) -> None:
    assert list(_broken(site)) == []


def test_the_citation_has_this_version() -> None:
    assert f"\nversion: {toolkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()
