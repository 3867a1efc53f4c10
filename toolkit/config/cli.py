"""Parse command-line settings of the form ``--table.key value``, ``--table.key=value``, ``--table.key`` for
true and ``--table.no-key`` for false; hyphens may replace underscores in names of tables and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.config.schema import Field, find_field, is_group
from toolkit.config.values import Setting, parse
from toolkit.errors import Problem

CONFIG_FILE = "job.config_file"
_SHORTHANDS = {"--debug": "--job.debug"}
_BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")  # all but two are then rejected


@dataclass
class Arguments:
    """Parsed arguments. ``help`` is the argument of ``--help``, "" if it has none, None without
    ``--help``."""

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    help: str | None = None


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Parse flags; the last one for a key wins. A first argument without dashes is ``job.config_file``. Names
    are validated, values are not."""
    arguments = Arguments()
    words = list(argv)
    if words and not words[0].startswith("-"):
        arguments.settings[CONFIG_FILE] = Setting(words.pop(0), "command line")
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            arguments.help = words.pop(0) if words and not words[0].startswith("-") else ""
            continue
        word = _SHORTHANDS.get(word, word)
        if not word.startswith("--"):
            arguments.problems.append(_stray(word, words))
            continue
        flag, equals, text = word.partition("=")
        key = _normalize(flag.removeprefix("--"))
        known = find_field(key)
        if known is None and not equals and (negated := _negated(key)):
            arguments.settings[negated.key] = Setting(False, flag)
            continue
        if known is None:
            from toolkit.config.did_you_mean import unknown_key

            value = text if equals else _take_value(words)
            arguments.problems.append(unknown_key(key, value, flag))
            continue
        value = text if equals else _take_value_for(words, known)
        if value is None:
            arguments.problems.append(Problem(f"{flag} needs a value", f"write {flag} VALUE", key, "", flag))
            continue
        arguments.settings[key] = Setting(parse(value, known.annotation), flag)
    return arguments


def _normalize(key: str) -> str:
    """Replace hyphens in a dotted key by underscores, except in names that users choose."""
    parts: list[str] = []
    for part in key.split("."):
        parts.append(part if is_group(".".join(parts)) else part.replace("-", "_"))
    return ".".join(parts)


def _negated(key: str) -> Field | None:
    """Return the boolean field that ``table.no_key`` sets to false."""
    table, _, name = key.rpartition(".")
    field = find_field(f"{table}.{name.removeprefix('no_')}") if name.startswith("no_") else None
    return field if field and field.annotation in (bool, bool | None) else None


def _take_value_for(words: list[str], known: Field) -> str | None:
    """Take the value from the next word; a boolean without a value is true."""
    if known.annotation is bool and not (words and words[0].lower() in _BOOLEAN_WORDS):
        return "true"
    return _take_value(words)


def _take_value(words: list[str]) -> str | None:
    return words.pop(0) if words and not words[0].startswith("--") else None


def _stray(word: str, words: list[str]) -> Problem:
    if word.endswith(".toml"):
        return Problem(f"{word!r} is not a flag", f"write --job.config_file {word}, or {word} first")
    flag = f"-{word}"
    if find_field(_normalize(flag.partition("=")[0].removeprefix("--"))):
        if "=" not in flag:
            _take_value(words)
        return Problem(f"{word!r} has only one dash", f"write {flag}")
    return Problem(
        f"{word!r} belongs to no flag",
        "write --table.key value; lists as a,b without spaces; quote a value that has spaces",
    )
