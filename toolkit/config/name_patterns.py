"""Shell-style patterns for names of modules and parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether ``name`` matches one of ``patterns``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the ``patterns`` that match none of ``names``."""
    return [pattern for pattern in patterns if not any(matches_any(name, [pattern]) for name in names)]
