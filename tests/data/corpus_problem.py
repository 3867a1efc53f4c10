"""The problem of a corpus, as the checks before a run tell it."""

from __future__ import annotations

from typing import Any

from toolkit.data.sources import open_corpus, problem_of
from toolkit.errors import DataError, Problem


def check_source(name: str, path: str | None, text_column: str = "text", **options: Any) -> Problem | None:
    """The problem that :func:`open_corpus` has with a corpus, or None."""
    try:
        open_corpus(name, path, text_column, **options)
    except DataError as error:
        return problem_of(error, path)
    return None
