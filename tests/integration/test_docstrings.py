"""Docstrings begin with a verb or the thing itself, those of names and config keys too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("toolkit", "tools", "benchmarks", "tests")
_BEGINS_OTHERWISE = re.compile(r"\s*(?:What|Whether|Of)\b")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Strings that stand alone, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text


def _wrong(source: str) -> list[tuple[int, str]]:
    return [(line, text) for line, text in _docstrings(source) if _BEGINS_OTHERWISE.match(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_the_thing_itself(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for file in files
        for line, text in _wrong(file.read_text(encoding="utf-8"))
    ]
    assert wrong == []


@pytest.mark.parametrize("begin", ["What it is.", "Whether it is.", "Of it.", "\n    What it is."])
@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "class A:\n    {}",
        "def f():\n    {}",
        "async def f():\n    {}",
        "class A:\n    key: int = 1\n    {}",
    ],
)
def test_other_beginnings_are_found(form: str, begin: str) -> None:
    assert len(_wrong(form.format(f'"""{begin}"""'))) == 1
    assert _wrong(form.format('"""Offsets of it. What is more, they are whole."""')) == []
