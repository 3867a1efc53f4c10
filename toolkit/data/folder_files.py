"""Choose a folder's text files: those of one split, if their names indicate splits, as in a cloned dataset.

Splits are detected as in Hugging Face's ``datasets``, for a dataset that does not list its files: by shards
(``data/train-00000-of-00002.parquet``), else by a word in folder names (``train/a.jsonl``), else by a word in
file names (``my_test-1.parquet``). If some files have such a word, files without one belong to no split.
Names are relative to the folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from toolkit.data.file_kinds import READ, SUFFIXES, SourceError
from toolkit.errors import Problem, first_few

_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
_SHARD = re.compile(r"data/([^/]+)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_IN_FOLDERS, _IN_FILES = (
    {split: re.compile(rf"(.*[-._ 0-9/])?({words}){end}") for split, words in _WORDS.items()}
    for end in (r"([-._ 0-9][^/]*)?/.*", r"[-._ 0-9][^/]*")
)
_NO_DATA = re.compile(
    r"(config|state|dataset_(info|infos|dict))\.json|(?i:readme|licen[cs]e|copying|notice|citation)\..*"
)
_LIKE_DATA = re.compile(
    r"(?i).*\.(csv|tsv|jsonl?|ndjson|jsonlines|txt|text|parquet|pq|arrow|feather|orc|avro|xlsx?|html?|xml|md|pdf"
    r"|zip|tar|tgz|7z|gz|bz2|xz|lzma|zstd?|lz4)"
)
_SHOWN = 3


class ChosenFiles(NamedTuple):
    """The ``names`` of the files to read, the ``splits`` of the folder, and a note on skipped files."""

    names: list[str]
    splits: tuple[str, ...]
    note: str


def choose_files(folder: str, names: Iterable[str], split: str | None) -> ChosenFiles:
    """Choose from ``names``, the paths of all files relative to ``folder``, separated by /.

    ``split`` None selects the only split.

    Raises:
            SourceError: The folder has no text, lacks the split, or has several splits and ``split`` is None.
    """
    text, no_data, unread = [], [], []
    for name in sorted(names):
        base = name.rpartition("/")[2]
        is_text = name.endswith(SUFFIXES)
        if _NO_DATA.fullmatch(base):
            no_data += [name] * is_text
        elif is_text:
            text.append(name)
        elif _LIKE_DATA.fullmatch(base):
            unread.append(name)
    if not text:
        rule = f"the folder contains no {READ} file" + f", only {first_few(unread, _SHOWN)}" * bool(unread)
        raise SourceError(Problem(rule, "check the folder", "dataset_path", folder))
    by_split = splits_by_name(text)
    if by_split and split is None and len(by_split) == 1:
        [split] = by_split
    if by_split and split not in by_split:
        raise no_split(folder, split, list(by_split))
    chosen = by_split[split] if by_split and split else text
    rest = set(text).difference(chosen)
    skipped = {f"split {name}": sorted(rest.intersection(files)) for name, files in by_split.items()}
    skipped["no split"] = sorted(rest.difference(*by_split.values()))
    skipped |= {"unsupported file type": unread, "no data": no_data}
    parts = [f"{first_few(files, _SHOWN)} ({why})" for why, files in skipped.items() if files]
    note = f"{folder}: " + f"{first_few(chosen, _SHOWN)} (split {split}) is used, and " * bool(by_split)
    return ChosenFiles(chosen, tuple(by_split), note + f"skipped: {', '.join(parts)}" if parts else "")


def no_split(folder: str, split: str | None, splits: list[str]) -> SourceError:
    """Return the error for a missing split, or for a choice among several splits."""
    present = ", ".join(splits)
    if split is None:
        rule, fix = f"the folder has several splits: {present}", "use the files or the folder of one of them"
        return SourceError(Problem(rule, fix, "dataset_path", folder))
    fix = f"it has {present}; set dataset_split to one of them, or dataset_path to files or a glob"
    return SourceError(Problem(f"{folder} has no such split", fix, "dataset_split", split))


def splits_by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each split, in the order of :data:`_WORDS` first; empty if no name indicates
    one."""
    names = list(names)
    shards: dict[str, list[str]] = {split: [] for split in _WORDS}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            shards.setdefault(shard[1], []).append(name)
    forms = [
        {split: [name for name in names if word.fullmatch(name)] for split, word in form.items()}
        for form in (_IN_FOLDERS, _IN_FILES)
    ]
    for candidate in (shards, *forms):
        if splits := {split: files for split, files in candidate.items() if files}:
            return splits
    return {}
