"""Arguments that several commands share, and flags for config keys in messages. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.commands import NAME
from toolkit.config.custom_import import import_module
from toolkit.config.local_paths import expand_user, path_problem
from toolkit.config.types import MAX_RANKS
from toolkit.config.values import Setting
from toolkit.errors import ConfigError, Problem, ToolkitError, redact


class _Parser(argparse.ArgumentParser):
    """Parser of a subcommand or of one of its actions."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.add_argument("--debug", action="store_true", help="show tracebacks of errors")


def command_parser(name: str, doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return the parser of a subcommand. The help text is the docstring of the command's module: the first
    line above the arguments, the rest below them. ``options`` are those of ArgumentParser."""
    summary, _, rest = (doc or "").partition("\n")
    return _Parser(
        prog=f"{NAME} {name}",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


TEXT_FLAGS = {"training.dataset_path": "--text", "data.text_column": "--text-column"}
"""Flags of commands that read text, for the config keys in its messages."""


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
    """Convert an argument to a number of ranks, or of objects that exist once per rank."""
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
    """Replace config keys by a program's flags in the problems that are raised inside the context.

    ``flags`` maps keys to flags. A key with a table is also replaced where it appears without the table.
    """
    try:
        yield
    except ToolkitError as error:
        if error.problems:
            error.problems = [_with_flags(problem, flags) for problem in error.problems]
            error.args = ("\n".join(map(str, error.problems)),)
        raise


@contextmanager
def writes(flag: str, path: Path) -> Iterator[None]:
    """Report that ``path``, which ``flag`` names, cannot be written.

    Raises:
        ConfigError: the context raised an OSError.
    """
    try:
        yield
    except OSError as error:
        rule = f"it cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(rule, "name another file", flag, str(path), "command line")) from None


def _with_flags(problem: Problem, flags: Mapping[str, str]) -> Problem:
    for key, flag in flags.items():
        word, said = re.compile(rf"(?<![\w.-]){re.escape(key)}\b"), flag.replace("\\", r"\\")
        problem = replace(problem, rule=word.sub(said, problem.rule), fix=word.sub(said, problem.fix))
        if problem.key in (key, key.rpartition(".")[2]):
            problem = replace(problem, key=flag, origin="")
    return problem


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of programs that use a model, for :func:`load_as_asked`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=local_path_text,
        help="a Hugging Face folder, a Meta folder, a run's folder or step-N of this toolkit, or an adapter",
    )
    parser.add_argument(
        "--adapter",
        metavar="[NAME=]FOLDER",
        action="append",
        default=[],
        help="on MODEL: a PEFT folder, or a run's folder or step-N of an adapter",
    )
    add_ema_argument(parser)
    parser.add_argument(
        "--tokenizer", metavar="PATH", type=local_path_text, help="its folder or file (default: the model's)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of the weights and all computation; auto: bfloat16 on devices with native support",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="under torchrun: shard each weight over N ranks, and use FSDP over the rest",
    )
    add_custom_import(parser)


def add_ema_argument(parser: argparse.ArgumentParser) -> None:
    """Add --ema, for programs that read the weights of a checkpoint."""
    parser.add_argument(
        "--ema", action="store_true", help="the moving average of trained weights (optimizer.ema_decay)"
    )


def add_bos_argument(parser: argparse.ArgumentParser) -> None:
    """Add --add-bos-token, for programs that process plain text rather than a chat format."""
    parser.add_argument(
        "--add-bos-token",
        action=argparse.BooleanOptionalAction,
        help="whether texts begin with BOS (default: as in the run, else as the tokenizer's files say)",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    """Add the sampling arguments with these defaults, for :func:`sampling_as_asked`."""
    add = parser.add_argument
    add(
        "--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help=f"default: {max_new_tokens}"
    )
    add(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0: the most likely token (default: {temperature})",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help=f"sample from the most likely tokens with total probability P (default: {top_p})",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens with at least P times the highest probability",
    )
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less")
    add("--seed", type=int, default=0)
