"""Docstrings begin with a verb or a noun phrase, and docstrings and messages use the field's words."""

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


_CLAUSES = re.compile(r"\s*(?:Say if|Tell|How|Why|Where|Which|Who|Those|As|If|See that)\b")
GLOSSARY = {
    r"\btold\b": "reported, logged",
    r"roll call": "rendezvous",
    r"\brefus(e|es|ed|ing)\b": "rejects, an error",
    r"\b(gives?|gave) way\b": "is overridden by",
    r"\b(go|goes|went) on\b": "resumes, continues",
    r"\bhand(s|ed)? out\b": "returns",
    r"\bin (the )?place of\b": "instead of",
    r"\bbeside\b": "next to, with",
    r"\b(do|does) nothing\b": "has no effect",
    r"\bleave it out\b": "remove it",
    r"(?<![Tt]here )\bis no\b(?! (more|longer|\w+er)\b)": "is not a",
    r"\b(for|at) want of\b": "without",
    r"\bthe one of\b": "that of",
    r"\b(anew|thereof|wherein|save for)\b": "again",
    r"\b(warm-up|time-out|roll-back|back end|micro batch)s?\b": "warmup, timeout, backend and so on",
    r"(token|initial|normal|optim|quant|serial|real|vector|orthogonal)is(e|es|ed|ing|ation|er)\b": "-ize",
    r"\b(colour|neighbour|behaviour|licence|learnt|labelled|modelled|cancelled)": "American spelling",
}
"""Patterns of words that docstrings and messages avoid, with the field's words for them."""


def _dialect(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, words found, the field's words) of docstrings and other texts of several words."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(str(text)) if " " in text:
                for pattern, better in GLOSSARY.items():
                    if match := re.search(pattern, text):
                        yield node.lineno, match[0], better


def test_texts_use_the_words_of_the_field() -> None:
    wrong = []
    for file in [file for folder in ("toolkit", "tools") for file in sorted((ROOT / folder).rglob("*.py"))]:
        source, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
        wrong += [f"{name}:{line}: {words!r}: write {better}" for line, words, better in _dialect(source)]
        wrong += [
            f"{name}:{line}: {text.strip().splitlines()[0]}"
            for line, text in _docstrings(source)
            if _CLAUSES.match(text)
        ]
    assert wrong == []


def test_words_of_the_glossary_are_found() -> None:
    found = list(
        _dialect('"""A run that goes on."""\nraise E(f"{a} is no file: it is refused")\nkey = "beside"')
    )
    assert [words for _, words, _ in found] == ["goes on", "refused", "is no"]
