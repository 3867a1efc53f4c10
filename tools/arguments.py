"""Argument types of the programs: paths, counts, and flags for config keys in messages. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from toolkit.config.custom_import import import_module
from toolkit.config.local_paths import expand_user, path_problem
from toolkit.config.types import MAX_RANKS
from toolkit.config.values import Setting
from toolkit.errors import ConfigError, Problem, ToolkitError, redact


def local_path_text(text: str, *, storage: bool = False) -> str:
    """Check an argument with one or several paths; with ``storage`` also URLs of object storage."""
    if found := path_problem(text, storage=storage):
        rule, fix = found
        raise argparse.ArgumentTypeError(f"{redact(text)!r}: {rule}\n  fix:  {fix}")
    return text


def local_path(text: str) -> Path:
    """Convert an argument to a local path, with ~ expanded."""
    return expand_user(local_path_text(text))


def any_path(text: str) -> Path:
    """Convert an argument to a path, local or in object storage."""
    return expand_user(local_path_text(text, storage=True))


def output_file(text: str) -> Path:
    """Convert an argument to a file to write; an unwritable one is reported before the work."""
    path = local_path(text)
    if problem := output_problem(path):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {problem}")
    return path


def output_problem(path: Path) -> str:
    """Return why no file can be written at ``path``, or "" if one can."""
    if path.is_dir():
        return "it is a folder"
    place = path if path.exists() else path.parent
    fits = os.access(place, os.W_OK) and (place is path or place.is_dir())
    return "" if fits else f"{place} is not there, or not to be written"


def count(text: str) -> int:
    """Convert an argument to a count of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def ranks(text: str) -> int:
    """Convert an argument to a number of ranks, or of something that each rank has one of."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_RANKS}, not {text!r}")
    return int(text)


def add_custom_import(parser: argparse.ArgumentParser) -> None:
    """Add the argument that imports a module with custom models."""
    parser.add_argument(
        "--custom-import",
        type=_imported,
        metavar="MODULE",
        help="the job.custom_import of a run whose model is of a family that it registers",
    )


def _imported(name: str) -> str:
    try:
        import_module(Setting(name, "--custom-import"))
    except ConfigError as error:
        found = error.problems[0]
        raise argparse.ArgumentTypeError(f"{name!r}: {found.rule}\n  fix:  {found.fix}") from None
    return name


@contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """Replace config keys by a program's flags in the problems that are raised inside.

    ``flags`` maps keys to flags; a key with its table matches without the table too.
    """
    try:
        yield
    except ToolkitError as error:
        if error.problems:
            error.problems = [_with_flags(problem, flags) for problem in error.problems]
            error.args = ("\n".join(map(str, error.problems)),)
        raise


def _with_flags(problem: Problem, flags: Mapping[str, str]) -> Problem:
    for key, flag in flags.items():
        word, said = re.compile(rf"(?<![\w.-]){re.escape(key)}\b"), flag.replace("\\", r"\\")
        problem = replace(problem, rule=word.sub(said, problem.rule), fix=word.sub(said, problem.fix))
        if problem.key in (key, key.rpartition(".")[2]):
            problem = replace(problem, key=flag, origin="")
    return problem
