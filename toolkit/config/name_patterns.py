"""Patterns of names of modules and parameters, as of a shell, compared with all that a model has."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import translate
from itertools import islice

_TOLD = 20  # nobody reads more


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Say if ``name`` is as one of ``patterns`` says."""
    if not patterns:
        return False
    exact, expression = _compiled(tuple(patterns))
    return name in exact or expression.match(name) is not None


def idle(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The first of ``patterns`` that none of ``names`` fits."""
    known = set(names)
    wrong = (
        pattern
        for pattern in patterns
        if pattern not in known and not any(map(_expression(pattern).match, known))
    )
    return list(islice(wrong, _TOLD))


@functools.lru_cache(maxsize=8)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """The names that stand for themselves, and the others as one expression."""
    wild = [pattern for pattern in patterns if any(sign in pattern for sign in "*?[")]
    return frozenset(patterns).difference(wild), re.compile("|".join(map(translate, wild)) or "(?!)")


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))
