"""A corpus as a list of files, whatever they are of, and the error of one that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data import text_files
from toolkit.data.file_kinds import COMPRESSED, COMPRESSION, RowShape, kind

if TYPE_CHECKING:
    from toolkit.data.text_files import Piece

CLASSIFICATION, PREFERENCE = "classification", "preference"
"""The formats of rows of a text and its class, and of two answers to a prompt."""


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
                yield from text_files.read_pieces(path, size)

    def fetched(self, cache_folder: Path, *, progress: bool, max_bytes: float, again: bool) -> Corpus:
        """The source with its files at hand, which these are."""
        return self
