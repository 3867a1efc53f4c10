"""Patterns of names of modules and parameters, as of a shell."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Say if ``name`` is as one of ``patterns`` says."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def idle(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return those of ``patterns`` that none of ``names`` fits."""
    return [pattern for pattern in patterns if not any(fits(name, [pattern]) for name in names)]
