"""TOML files as settings: what a file says itself over what it extends, each value with its line.

tomllib does not tell the line of a key, and so reads the file again, statement by statement: a statement ends
with a line that leaves no string and no bracket open. In a file that tomllib refuses, this finds what comes
before the fault, which is enough to name a key given twice.
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
from toolkit.config.schema import find_field, find_table, is_group
from toolkit.config.toml_text import MAX_LENGTH, parse_toml
from toolkit.config.values import Setting
from toolkit.errors import Problem

_EXTENDS = "extends"
Origin = Callable[[Path], str]


@dataclass
class Layer:
    """Settings of one or more files, and the problems of reading them."""

    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_files(path: str, *, origin: str = "--job.config_file") -> Layer:
    """Read ``path`` and the files that it extends, nearest last. ``origin`` is who names ``path``."""
    return _read(path, Problem("", "", "job.config_file", path, origin), ())


def _read(path: str, named_by: Problem, children: tuple[str, ...]) -> Layer:
    """Read a file. ``named_by`` has key, value and origin of what names it; ``children`` extend it."""

    def misnamed(rule: str, fix: str) -> Layer:
        return Layer(problems=[Problem(rule, fix, named_by.key, named_by.value, named_by.origin)])

    if wrong := path_problem(named_by.value if isinstance(named_by.value, str) else path):
        return misnamed(*wrong)
    if any(os.path.realpath(path) == os.path.realpath(child) for child in children):
        return misnamed(
            f"files extend one another in a circle: {' → '.join([*children, path])}",
            "remove one of these extends",
        )
    try:
        text = read_text(path, at_most=MAX_LENGTH)
    except FileNotFoundError:
        return misnamed(f"there is no file {path}", similar_file(path))
    except OSError as error:
        return misnamed(f"{path} cannot be read: {error.strerror}", "give the name of a readable TOML file")
    try:
        document = parse_toml(text)
    except ValueError as error:
        return Layer(problems=[syntax_problem(path, text, error)])
    lines: dict[Path, int] = {}
    for key, line in key_lines(text):
        for length in range(1, len(key) + 1):
            lines.setdefault(key[:length], line)

    def origin(key: Path) -> str:
        """Where a key is, or the first key inside a table that has no header."""
        return f"{path}:{lines[key]}"

    layer = _extended(path, document, origin, (*children, path))
    _flatten(document, (), origin, len(children) + 1, layer)
    return layer


def _extended(path: str, document: dict[str, Any], origin: Origin, children: tuple[str, ...]) -> Layer:
    if _EXTENDS not in document:
        return Layer()
    base, where = document.pop(_EXTENDS), origin((_EXTENDS,))
    if not isinstance(base, str):
        rule, fix = "must be the name of one TOML file", 'write extends = "other.toml"'
        return Layer(problems=[Problem(rule, fix, _EXTENDS, base, where)])
    return _read(os.path.join(os.path.dirname(path), base), Problem("", "", _EXTENDS, base, where), children)


def _flatten(document: dict[str, Any], prefix: Path, origin: Origin, depth: int, layer: Layer) -> None:
    """Add the keys of ``document``, which lies at ``prefix`` of a file of this ``depth``, to ``layer``."""
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
