"""A corpus: an ordered list of files of any supported kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data import text_files
from toolkit.data.file_kinds import COMPRESSED, COMPRESSION, RowShape, kind

if TYPE_CHECKING:
    from toolkit.data.text_files import Chunk

CLASSIFICATION, PREFERENCE, UNPAIRED = "classification", "preference", "unpaired_preference"
"""Formats of rows with a text and its class, with two answers to a prompt, and with an answer and its
label."""


@dataclass(frozen=True)
class Corpus:
    """An ordered list of files. ``name`` is the user's name for it.

    ``identity`` identifies the contents if they are known without reading the files. With a ``shape``, rows
    are conversations or labeled texts instead of plain texts. ``splits`` are the splits of the files' folder;
    ``notes`` describe which of its files are used and which are skipped.
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
        """Available choices: "subset", "split", both or none."""
        return {"split"} if self.splits else set()

    @property
    def n_bytes(self) -> int:
        """Size of the files on disk in bytes, possibly compressed."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def n_text_bytes(self) -> int:
        """Approximate number of bytes of text."""
        rows = [path for path in self.files if kind(path) == "rows"]
        others = [path for path in self.files if kind(path) != "rows"]
        size = sum(path.stat().st_size * (COMPRESSION if path.suffix in COMPRESSED else 1) for path in others)
        if self.shape:
            return size + sum(path.stat().st_size * COMPRESSION for path in rows)
        if not rows:
            return size
        from toolkit.data import parquet  # the import takes tenths of a second

        return size + parquet.text_bytes(rows, self.text_column)

    def chunks(self, size: int = 0) -> Iterator[Chunk]:
        """Yield all files in order as chunks of about ``size`` bytes of text, or 1 MiB.

        Raises:
            DataError: A file cannot be read.
        """
        for path in self.files:
            if kind(path) == "rows":
                from toolkit.data import parquet

                shape = self.shape
                yield from (
                    parquet.read_shaped(path, shape)
                    if shape
                    else parquet.read_chunks(path, self.text_column, size)
                )
            else:
                yield from text_files.read_chunks(path, size)

    def fetch(self, cache_folder: Path, *, progress: bool, max_bytes: float, again: bool) -> Corpus:
        """Return the corpus with its files on this machine; the files of this class are already local."""
        return self
