"""Sources of text: files found by name, folder or glob, or a dataset of the Hugging Face Hub.

Text, JSON and Parquet are supported (:mod:`toolkit.data.text_files`, :mod:`toolkit.data.parquet`), and
folders written by ``datasets.save_to_disk``. A corpus consists of the files in sorted order, each with its
documents in file order. A dataset of the Hub is downloaded only when its tokens are first needed
(:mod:`toolkit.data.hub`)."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.schema import registry
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import RowShape, SourceError
from toolkit.errors import DataError, Problem, did_you_mean

EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
EMBEDDED = {
    "embedded": "train.jsonl.gz",
    "c4_test": "train.jsonl.gz",
    "embedded_validation": "validation.jsonl.gz",
    "c4_validation": "validation.jsonl.gz",
}
STAND_INS = {"c4_test": "embedded", "c4_validation": "embedded_validation"}
"""Names of the embedded books: their own, and torchtitan's names for samples of C4, which the books replace
offline."""


def open_corpus(
    name: str,
    path: str | None,
    text_column: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
    shape: RowShape | None = None,
) -> Corpus:
    """Find a corpus: the files at ``path`` if given, else the corpus called ``name``.

    ``path`` is a file, a folder (searched recursively, or written by ``save_to_disk``), a glob, or a
    comma-separated list of these. ``name`` is an embedded corpus, or a dataset of the Hugging Face Hub with
    its owner. ``subset`` and ``split`` select from a dataset of the Hub; ``split`` also selects from a folder
    with several splits. Finding a corpus takes milliseconds and does not access the network. Columns are
    checked in the first row, or in the schema of the first file that has one.

    Raises:
        SourceError: The name is unknown, or the path, text files, a column or a package is missing.
    """
    if path is None and name in registry("training.dataset"):
        from toolkit.data.registered import registered_corpus

        return registered_corpus(name, text_column, shape)
    if path is None and name not in EMBEDDED:
        from toolkit.data import hub

        if unknown := check_name(name):
            raise SourceError(unknown)
        return hub.hub_dataset(name, text_column, subset, split, shape)
    if path is None:
        source = Corpus(name, (EMBEDDED_FOLDER / EMBEDDED[name],), "text", shape=shape)
        if shape is None:
            return source  # it has this column
    from toolkit.data.find_files import check_columns, find

    if path is not None:
        files, splits, notes = find(path, split=split)
        source = Corpus(path, files, text_column, shape=shape, splits=splits, notes=notes)
    check_columns(source)
    return source


def problem_of(error: DataError, path: str | None) -> Problem:
    """Convert an error of :func:`open_corpus` into a problem."""
    if isinstance(error, SourceError):
        return error.problems[0]
    rule, _, fix = str(error).partition("\n  fix:  ")
    return Problem(rule, fix, "dataset_path", path)


def check_name(name: str) -> Problem | None:
    """Return a problem if ``name`` is not a possible corpus name."""
    if name in EMBEDDED or name in registry("training.dataset") or "/" in name:
        return None
    from toolkit.data import hub

    if name in hub.KNOWN:
        return None
    named = [*EMBEDDED, *hub.KNOWN, *registry("training.dataset")]
    names = ", ".join(named)
    hint = (
        f"the names are {names}; write a dataset of the Hugging Face Hub with its owner, such as "
        f"Salesforce/wikitext; for local files set dataset_path"
    )
    fix = did_you_mean(name, named, hint)
    return Problem("there is no dataset of this name", fix, "dataset", name)
