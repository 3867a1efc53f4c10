"""The exception tree, the report of an error to the user, and helpers that format messages.

Exit codes of ``python -m toolkit.train`` and ``run_train.sh``: 0 finished; 2 configuration or arguments;
3 data or checkpoint unusable; 75 stopped by a signal after saving (requeue the job); 1 any other error.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EXIT_FINISHED = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_REQUEUE = 75
_MAX_CHARACTERS = 500


@dataclass(frozen=True)
class Problem:
    """One broken rule: the user's value, the rule and the fix.

    ``origin`` is the source of the value ("debug.toml:12", "--training.seq_len", "default"). ``key`` and
    ``value`` are empty if no single key is at fault.
    """

    rule: str
    fix: str
    key: str = ""
    value: object = None
    origin: str = ""

    def __str__(self) -> str:
        what = f"{self.key} = {quote(self.value)}" if self.key else ""
        where = f"{self.origin}: " if self.origin and what else ""
        head = f"{where}{what}\n  rule: " if what else ""
        return f"{head}{self.rule}\n  fix:  {self.fix}"


class ToolkitError(Exception):
    """Base of every error that is reported to the user without a traceback."""

    exit_code = EXIT_ERROR
    problems: Sequence[Problem] = ()


class ConfigError(ToolkitError):
    """The configuration, a flag or the mesh is invalid. Carries every problem found."""

    exit_code = EXIT_CONFIG
    problems: list[Problem]

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DeviceError(ConfigError):
    """A rank finds no device, or a different one than the preflight found."""


class DataError(ToolkitError):
    """A corpus or tokenizer is missing, empty, undecodable or incompatible with the model."""

    exit_code = EXIT_DATA


class CheckpointError(ToolkitError):
    """A checkpoint is missing, incomplete, altered or incompatible with the run."""

    exit_code = EXIT_DATA


class TrainingError(ToolkitError):
    """The run cannot continue, for example because the loss is not finite."""


class OutOfMemory(TrainingError):
    """One rank is out of device memory. That rank reports the error; other ranks only see its exit."""


def report(error: BaseException, *, show: bool, debug: bool = False) -> int:
    """Print ``error`` to stderr if ``show`` (rank 0 or the failing rank) and return the exit code.

    A :class:`ToolkitError` is printed as a message; any other error, or with ``debug``, as a traceback.
    """
    _write_torchrun_error(error)
    if show:
        if debug or not isinstance(error, ToolkitError):
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        if isinstance(error, ToolkitError):
            print(f"error: {printable(str(error))}", file=sys.stderr)
            if not debug:
                print("(--debug shows the traceback)", file=sys.stderr)
        sys.stderr.flush()
    return error.exit_code if isinstance(error, ToolkitError) else EXIT_ERROR


def _write_torchrun_error(error: BaseException) -> None:
    """Write ``error`` to torchrun's error file, so that torchrun's report of about forty lines ends with it.

    torchrun reports the oldest error file of its ranks. Every rank writes one, because torchrun kills the
    other ranks after the first exit; the file's timestamp is one second early so that it is the oldest.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    expected = isinstance(error, ToolkitError)
    text = f"error: {error}" if expected else "".join(traceback.format_exception(error))
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}}
    with suppress(OSError), open(file, "w", encoding="utf-8") as reply:
        json.dump({"message": message}, reply)


def quote(value: object, write: Callable[[object], str] = repr) -> str:
    """Format ``value`` with ``write`` for a message, truncated and redacted. Never raises."""
    try:
        text = redact(write(value))
    except (ValueError, RecursionError):  # an integer of too many digits; nested too deep
        return f"a value of {type(value).__name__} that is too large to show"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}… ({len(text):,} characters)"


def redact(text: str) -> str:
    """Replace credentials (user and password, query string) in the URLs of ``text`` by asterisks."""
    return re.sub(r"(://)[^/@\s'\"]*@|(://[^\s'\"?]*\?)[^\s'\"]+", r"\1\2***", text)


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the closest match to ``name`` among ``names``, ignoring case, or None."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """Suggest the closest of ``names`` as a fix, or ``otherwise`` if none is close."""
    found = closest(name, names)
    return f"did you mean {found}?" if found else otherwise


def nearest_multiple(value: int, of: int) -> int:
    return max(1, math.floor(value / of + 0.5)) * of


def divisors(value: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})


def join_or(items: Iterable[object]) -> str:
    """Join ``items`` as a choice: "1, 2 or 3"."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} or {last}" if rest else last


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, from a checkout or from the wheel."""
    if not (Path(__file__).parents[1] / "pyproject.toml").exists():
        return f"pip install 'llama-toolkit[{extra}]'"
    return f".venv/bin/python -m pip install -c constraints.txt -e '.[{extra}]', in the toolkit's folder"


def first_few(items: Sequence[str], limit: int) -> str:
    """Join up to ``limit`` items with commas in one line, and append the count of the rest."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return one_line(", ".join(items[:limit]) + rest)


# Unicode categories: control, format (such as bidirectional overrides), surrogate, line and paragraph
# separator
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """Escape characters that would control a terminal or hide text; newlines and tabs stay.

    >>> printable("a name\\x1b[2J")
    'a name\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and unicodedata.category(character) in _ESCAPED
        else character
        for character in text
    )


def one_line(text: str) -> str:
    """Escape newlines, and the characters that :func:`printable` escapes."""
    return printable(text).replace("\n", "\\n")
