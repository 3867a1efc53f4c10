"""A corpus as a list of files, whatever they are of, and the error of one that cannot be used."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import DataError, Problem, install

if TYPE_CHECKING:
    from toolkit.data.text_files import Piece

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed text and JSON."""
COMPRESSION = 3  # compressed text is about three times as long as its file
READ = ".txt, .jsonl or .json (plain, .gz, .bz2, .xz or .zst) or .parquet"
SUFFIXES = (".parquet", *(kind + how for kind in (".txt", ".jsonl", ".json") for how in ("", *COMPRESSED)))
"""Those of every file that is read, which :data:`READ` tells."""


class SourceError(DataError):
    """A corpus cannot be used; its problem names one of its keys in the config, such as dataset_path."""

    def __init__(self, problem: Problem):
        self.problems = [problem]
        super().__init__(str(problem))


CLASSIFICATION, PREFERENCE = "classification", "preference"
"""The formats of rows of a text and its class, and of two answers to a prompt."""


class RowShape(Protocol):
    """Contents of a row, where that is more than one text."""

    @property
    def format(self) -> str: ...

    def columns(self, there: Collection[str], where: str) -> list[str]:
        """The columns to read, of those that are ``there``. Raises SourceError; it says ``where``."""

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError where a row is none of these."""


@dataclass(frozen=True)
class Corpus:
    """An ordered list of files. ``name`` is what the user called it.

    ``identity`` names the contents where they are known without reading the files. With a ``shape`` its
    rows are more than texts: conversations, or texts with a class. ``splits`` are those that a folder has, of
    which the files are one; ``notes`` say what of a folder was taken and what left out.
    """

    name: str
    files: tuple[Path, ...]
    text_column: str
    identity: str = ""
    shape: RowShape | None = None
    splits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def choices(self) -> set[str]:
        """Which of "subset" and "split" mean something for it."""
        return {"split"} if self.splits else set()

    @property
    def n_bytes(self) -> int:
        """Bytes of the files on disk, compressed as they are."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def n_text_bytes(self) -> int:
        """About how many bytes of text there are."""
        rows = [path for path in self.files if kind(path) == "rows"]
        others = [path for path in self.files if kind(path) != "rows"]
        size = sum(path.stat().st_size * (COMPRESSION if path.suffix in COMPRESSED else 1) for path in others)
        if self.shape:
            return size + sum(path.stat().st_size * COMPRESSION for path in rows)
        if not rows:
            return size
        from toolkit.data import parquet  # some tenths of a second

        return size + parquet.text_bytes(rows, self.text_column)

    def pieces(self, size: int = 0) -> Iterator[Piece]:
        """Every file, in order, as pieces of about ``size`` bytes of text, or 1 MiB. Raises DataError for a
        file that cannot be read."""
        for path in self.files:
            if kind(path) == "rows":
                from toolkit.data import parquet

                shape = self.shape
                yield from (
                    parquet.read_shaped(path, shape)
                    if shape
                    else parquet.read_pieces(path, self.text_column, size)
                )
            else:
                from toolkit.data import text_files

                yield from text_files.read_pieces(path, size)

    def fetched(self, cache_folder: Path, *, progress: bool, max_bytes: float, again: bool) -> Corpus:
        """The source with its files at hand, which these are."""
        return self


def kind(path: Path) -> str:
    """Tell a file's kind by its name: "text", "json", or "rows" of columns."""
    if path.suffix in (".parquet", ".arrow"):
        return "rows"
    return "json" if is_json(path) else "text"


def is_json(path: Path) -> bool:
    """Say if the file has rows of JSON (else it is plain text), by its name."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return name.endswith((".jsonl", ".json"))


def require(package: str, what: str, key: str, value: str | None) -> None:
    """Raise SourceError where ``package``, which ``what`` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        rule = f"{what} needs the package {package}, which is not installed"
        raise SourceError(Problem(rule, install("hf"), key, value))
