"""Which files of a folder are its text: those of one split where their names tell splits, as in a clone of a
dataset.

Splits are found as Hugging Face's ``datasets`` finds them where a dataset does not list its files: by shards
(``data/train-00000-of-00002.parquet``), else by a word in the names of folders (``train/a.jsonl``), else by a
word in those of files (``my_test-1.parquet``). Beside others with such a word, a file without is of no split.
Names count from the folder on.
"""

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


class Taken(NamedTuple):
    """The ``names`` of the files that are read, the ``splits`` that the folder has, and a note where some of
    its files are left out."""

    names: list[str]
    splits: tuple[str, ...]
    note: str


def take(folder: str, names: Iterable[str], split: str | None) -> Taken:
    """Choose from the ``names`` of all files in ``folder``, with / between their parts; ``split`` None is the
    only one there is.

    Raises:
        SourceError: the folder has no text, not this split, or several where none is asked for.
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
        rule = f"the folder holds no {READ} file" + f", only {first_few(unread, _SHOWN)}" * bool(unread)
        raise SourceError(Problem(rule, "check the folder", "dataset_path", folder))
    by_split = splits_by_name(text)
    if by_split and split is None and len(by_split) == 1:
        [split] = by_split
    if by_split and split not in by_split:
        raise no_split(folder, split, list(by_split))
    taken = by_split[split] if by_split and split else text
    rest = set(text).difference(taken)
    left = {f"split {name}": sorted(rest.intersection(found)) for name, found in by_split.items()}
    left["no split"] = sorted(rest.difference(*by_split.values()))
    left |= {"not a kind of file that is read": unread, "no data": no_data}
    said = [f"{first_few(found, _SHOWN)} ({why})" for why, found in left.items() if found]
    note = f"{folder}: " + f"{first_few(taken, _SHOWN)} (split {split}) is taken, and " * bool(by_split)
    return Taken(taken, tuple(by_split), note + f"left out: {', '.join(said)}" if said else "")


def no_split(folder: str, split: str | None, splits: list[str]) -> SourceError:
    """The error of a split that a folder has not, or of one that is to be chosen and cannot."""
    there = ", ".join(splits)
    if split is None:
        rule, fix = f"the folder has several splits: {there}", "name the files or the folder of one of them"
        return SourceError(Problem(rule, fix, "dataset_path", folder))
    fix = f"it has {there}; set dataset_split to one of them, or name files or a glob in dataset_path"
    return SourceError(Problem(f"{folder} has no such split", fix, "dataset_split", split))


def splits_by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each split, first those of :data:`_WORDS`; none where no name tells one."""
    names = list(names)
    shards: dict[str, list[str]] = {split: [] for split in _WORDS}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            shards.setdefault(shard[1], []).append(name)
    forms = [
        {split: [name for name in names if word.fullmatch(name)] for split, word in form.items()}
        for form in (_IN_FOLDERS, _IN_FILES)
    ]
    for found in (shards, *forms):
        if found := {split: those for split, those in found.items() if those}:
            return found
    return {}
