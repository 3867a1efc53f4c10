"""One exception tree, the one way in which a mistake reaches the user, and the parts of its messages.

Exit codes of ``python -m toolkit.train`` and ``run_train.sh``: 0 finished; 2 configuration
or arguments; 3 data or checkpoint unusable; 75 stopped by a signal after saving (requeue me);
1 anything else.
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

EXIT_FINISHED = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_REQUEUE = 75
_SHOWN = 500


@dataclass(frozen=True)
class Problem:
    """One broken rule: what the user wrote, what it breaks and what to do.

    ``origin`` says where the value came from ("debug.toml:12", "--training.seq_len",
    "default"); ``key`` and ``value`` may be empty when no single key is at fault.
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
    """The configuration, a flag or the mesh cannot be right. Carries every problem found."""

    exit_code = EXIT_CONFIG
    problems: list[Problem]

    def __init__(self, problems: Problem | Sequence[Problem]):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DeviceError(ConfigError):
    """A rank finds another device than the checks before it did, or none for itself."""


class DataError(ToolkitError):
    """A corpus or tokenizer is missing, empty, undecodable or does not fit the model."""

    exit_code = EXIT_DATA


class CheckpointError(ToolkitError):
    """A checkpoint is missing, incomplete, altered or does not fit the run."""

    exit_code = EXIT_DATA


class TrainingError(ToolkitError):
    """The run itself cannot go on, for example because the loss is not finite."""


class OutOfMemory(TrainingError):
    """The device of one rank is full. Its peers only see that it has gone, so it tells the user itself."""


def report(error: BaseException, *, show: bool, debug: bool = False) -> int:
    """Print ``error`` to stderr where ``show`` (rank 0, or the failing rank) and return the exit code.

    A :class:`ToolkitError` is one message; anything else, or ``debug``, is a traceback.
    """
    _leave_for_torchrun(error)
    if show:
        if debug or not isinstance(error, ToolkitError):
            print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        if isinstance(error, ToolkitError):
            print(f"error: {printable(str(error))}", file=sys.stderr)
            if not debug:
                print("(--debug shows the traceback)", file=sys.stderr)
        sys.stderr.flush()
    return error.exit_code if isinstance(error, ToolkitError) else EXIT_ERROR


def _leave_for_torchrun(error: BaseException) -> None:
    """Have the message end what torchrun prints, some forty lines in which it would be lost.

    torchrun takes the oldest of the files that it has named to its ranks. Every rank leaves one, since the
    first that ends has the others killed, perhaps before they tell; it is a second older than the killed.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    unforeseen = not isinstance(error, ToolkitError)
    text = "".join(traceback.format_exception(error)) if unforeseen else f"error: {error}"
    told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}}
    with suppress(OSError), open(file, "w", encoding="utf-8") as reply:
        json.dump({"message": told}, reply)


def quote(value: object, write: Callable[[object], str] = repr) -> str:
    """``value`` as ``write`` has it, cut where that is long; it may be what cannot be written at all."""
    try:
        text = redact(write(value))
    except (ValueError, RecursionError):  # an integer of too many digits; nested too deep
        return f"a value of {type(value).__name__} that is too large to be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def redact(text: str) -> str:
    """``text`` with stars for what its URLs hold of credentials: user and password, and a query."""
    return re.sub(r"(://)[^/@\s'\"]*@|(://[^\s'\"?]*\?)[^\s'\"]+", r"\1\2***", text)


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that looks most like ``name``, if any does, whatever the case."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a fix: the closest of ``names``, else ``otherwise``."""
    found = closest(name, names)
    return f"did you mean {found}?" if found else otherwise


def nearest_multiple(value: int, of: int) -> int:
    return max(1, math.floor(value / of + 0.5)) * of


def divisors(value: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})


def join_or(items: Iterable[object]) -> str:
    """``items`` as a choice: "1, 2 or 3"."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} or {last}" if rest else last


def install_command(extra: str) -> str:
    """The command for the packages of an extra of pyproject.toml."""
    return f".venv/bin/python -m pip install -c constraints.txt -e '.[{extra}]', in the toolkit's folder"


def first_few(items: Sequence[str], limit: int) -> str:
    """``items`` with commas between, in one line; beyond ``limit`` only how many more there are."""
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return one_line(", ".join(items[:limit]) + rest)


# control, format (bidirectional overrides among them), surrogate, line and paragraph separator
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    """``text`` in lines; what else would steer a terminal, or hide what is there, is written as its escape.

    >>> printable("a name\\x1b[2J")
    'a name\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and unicodedata.category(character) in _STEERING
        else character
        for character in text
    )


def one_line(text: str) -> str:
    """``text`` as :func:`printable` has it, with its ends of lines escaped as well."""
    return printable(text).replace("\n", "\\n")
