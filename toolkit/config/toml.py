"""Read settings from TOML files that extend one another, each value with its line.

tomllib does not report the lines of keys, so the file is parsed again, statement by statement: a statement
ends at a line end outside all strings and brackets. In invalid files this still finds everything before the
error, which is enough to report a duplicate key.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from toolkit.config.did_you_mean import unknown_key
from toolkit.config.key_lines import Path, key_lines
from toolkit.config.local_paths import path_problem, read_text
from toolkit.config.mistakes import similar_file, syntax_problem
from toolkit.config.presets import find
from toolkit.config.schema import find_field, find_table, is_group
from toolkit.config.toml_text import MAX_LENGTH, parse_toml
from toolkit.config.values import Setting
from toolkit.errors import Problem

EXTENDS = "extends"
Origin = Callable[[Path], str]


@dataclass
class Layer:
    """Settings of one or more files, and the problems found while reading them."""

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_files(path: str, *, origin: str = "--job.config_file") -> Layer:
    """Read ``path``, a file or a preset, and the files that it extends. ``origin`` is that of ``path``."""
    return _read(find(path), Problem("", "", "job.config_file", path, origin), ())


def _read(path: str, named_by: Problem, children: tuple[str, ...]) -> Layer:
    """Read a file that ``named_by`` (its key, value and origin) refers to and that ``children`` extend."""

    def invalid(rule: str, fix: str) -> Layer:
        return Layer(problems=[Problem(rule, fix, named_by.key, named_by.value, named_by.origin)])

    if wrong := path_problem(named_by.value if isinstance(named_by.value, str) else path):
        return invalid(*wrong)
    if any(os.path.realpath(path) == os.path.realpath(child) for child in children):
        return invalid(
            f"files extend one another in a cycle: {' → '.join([*children, path])}",
            "remove one of these extends",
        )
    try:
        text = read_text(path, at_most=MAX_LENGTH)
    except FileNotFoundError:
        return invalid(f"there is no file {path}", similar_file(path))
    except OSError as error:
        return invalid(f"{path} cannot be read: {error.strerror}", "use a readable TOML file")
    try:
        document = parse_toml(text)
    except ValueError as error:
        return Layer(problems=[syntax_problem(path, text, error)])
    lines: dict[Path, int] = {}
    for key, line in key_lines(text):
        for length in range(1, len(key) + 1):
            lines.setdefault(key[:length], line)

    def origin(key: Path) -> str:
        """Return the position of a key, or of the first key in a table without header."""
        return f"{path}:{lines[key]}"

    layer = _extended(path, document, origin, (*children, path))
    _flatten(document, (), origin, len(children) + 1, layer)
    return layer


def _extended(path: str, document: dict[str, Any], origin: Origin, children: tuple[str, ...]) -> Layer:
    if EXTENDS not in document:
        return Layer()
    base, where = document.pop(EXTENDS), origin((EXTENDS,))
    if not isinstance(base, str):
        rule, fix = "must be the name of one TOML file", 'write extends = "other.toml"'
        return Layer(problems=[Problem(rule, fix, EXTENDS, base, where)])
    return _read(find(base, inside=os.path.dirname(path)), Problem("", "", EXTENDS, base, where), children)


def _flatten(document: dict[str, Any], prefix: Path, origin: Origin, depth: int, layer: Layer) -> None:
    """Add the keys of ``document``, the table ``prefix`` of a file at this ``depth``, to ``layer``."""
    for name, value in document.items():
        path = (*prefix, name)
        key, where = ".".join(path), origin(path)
        if find_field(key):
            layer.settings[key] = Setting(value, where, depth)
        elif not find_table(key) and not is_group(key):
            layer.problems.append(unknown_key(key, value, where))
        elif value == {} and is_group(".".join(prefix)):
            rule, fix = f"[{key}] is empty", "write at least one key below it, or remove it"
            layer.problems.append(Problem(rule, fix, key, value, where))
        elif isinstance(value, dict):
            _flatten(value, path, origin, depth, layer)
        else:
            rule, fix = f"{key} is a table", f"write [{key}] and its keys below it"
            layer.problems.append(Problem(rule, fix, key, value, where))
