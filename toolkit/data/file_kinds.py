"""Kinds of text files by their names, and the error for an unusable corpus."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from toolkit.errors import DataError, Problem, install_command

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed text and JSON."""
COMPRESSION = 3  # text is about three times the size of its compressed file
READ = ".txt, .jsonl or .json (plain, .gz, .bz2, .xz or .zst) or .parquet"
SUFFIXES = (".parquet", *(kind + how for kind in (".txt", ".jsonl", ".json") for how in ("", *COMPRESSED)))
"""Suffixes of all supported files, as in :data:`READ`."""


class SourceError(DataError):
    """A corpus cannot be used; its problem names a config key such as dataset_path."""

    def __init__(self, problem: Problem):
        self.problems = [problem]
        super().__init__(str(problem))


class RowShape(Protocol):
    """Format of rows other than plain text."""

    @property
    def format(self) -> str: ...

    def columns(self, names: Collection[str], where: str) -> list[str]:
        """Return the columns to read, among ``names``. Raises SourceError with ``where`` in its message."""

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError if a row does not have this shape."""


def kind(path: Path) -> str:
    """Return a file's kind, based on its name: "text", "json", or "rows" (columnar)."""
    if path.suffix in (".parquet", ".arrow"):
        return "rows"
    return "json" if is_json(path) else "text"


def is_json(path: Path) -> bool:
    """Return whether the file contains JSON rows, not plain text, based on its name."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return name.endswith((".jsonl", ".json"))


def require(package: str, what: str, key: str, value: str | None) -> None:
    """Raise SourceError if ``package``, which ``what`` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        rule = f"{what} needs the package {package}, which is not installed"
        raise SourceError(Problem(rule, install_command("hf"), key, value))
