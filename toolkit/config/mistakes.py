"""Descriptions of invalid files and values, with suggestions; imported only if there are any."""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Le, Len, Lt, MaxLen

from toolkit.config import presets
from toolkit.config.key_lines import Path, key_lines
from toolkit.config.schema import Field, find_field
from toolkit.config.types import MAX_INT, NONE, allows_none
from toolkit.config.values import Setting, format_toml, parse
from toolkit.errors import Problem, closest, did_you_mean

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {str: "strings", int: "integers", float: "numbers"}


def wrong_value(location: tuple[int | str, ...], settings: Mapping[str, Setting]) -> Problem:
    """Describe an error that pydantic found at a location: a key, possibly followed by unions and lists."""
    prefixes = [".".join(map(str, location[:length])) for length in range(len(location), 0, -1)]
    if location[-1] == "[key]":
        origin = next(setting.origin for key, setting in settings.items() if key.startswith(prefixes[1]))
        rule = f"a name in [{prefixes[2]}] may only contain letters, digits, - and _"
        return Problem(rule, "use such a name", prefixes[2], location[-2], origin)
    field = next(field for field in map(find_field, prefixes) if field)
    return _of_field(field, settings[field.key])


def _of_field(field: Field, setting: Setting) -> Problem:
    rule = f"must be {_describe_type(field.annotation, field.marks)}"
    if setting.value in ("float16", "fp16", "half") and field.table == "training":
        rule += "; float16 would need loss scaling, which is not supported"
    return Problem(rule, _fix(field, setting), field.key, setting.value, setting.origin)


def _fix(field: Field, setting: Setting) -> str:
    """Suggest a similar value, else the default as an example."""

    def write(value: object) -> str:
        if setting.origin.startswith("--"):
            words = ",".join(value) if isinstance(value, list) and value else value
            text = words if isinstance(words, str) else format_toml(words).strip('"')
            return f"{setting.origin} {text}"
        return f"{field.name} = {format_toml(value)}"

    guess = _guess(setting.value, field.annotation)
    if guess is not setting.value and guess != setting.value:  # nan is not equal to itself
        return f"did you mean {write(guess)}?"
    if field.default is None:
        return f"remove {field.name}, or set it to such a value"
    return f"for example {write(field.default)}, the default"


def _guess(value: object, annotation: Any) -> object:
    """Guess what an invalid value, or each item of a list, stands for; return it unchanged without a
    guess."""
    named = _choices(annotation)
    if isinstance(value, str):
        return closest(value, named) or parse(value, annotation)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        near = [closest(item, named) for item in value]
        return near if all(near) else value
    return value


def _describe_type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Complete the sentence "must be …" for a type, for example "an integer of at least 1"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe_type(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        alternatives = [_describe_type(a, metadata) for a in arguments if a is not types.NoneType]
        return " or ".join([*alternatives, f'"{NONE}"'] if allows_none(annotation) else alternatives)
    if origin is Literal:
        alternatives = [json.dumps(choice) for choice in arguments]
        return alternatives[0] if len(alternatives) == 1 else f"one of {', '.join(alternatives)}"
    if origin is list:
        return f"a list of {_plural(arguments[0])}{_length(metadata)}"
    if origin is dict:
        others = "" if arguments[1] is str else ", true and false"
        return f'a table of strings{others}, such as {{a = "b"}}'
    return _WORDS[annotation] + _bounds(metadata)


def _plural(annotation: Any) -> str:
    if typing.get_origin(annotation) is list:
        return f"lists of {_plural(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is Literal:
        return " and ".join(json.dumps(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _plural(inner) + _bounds(tuple(metadata))
    return _PLURALS[annotation]


def _length(metadata: tuple[Any, ...]) -> str:
    longest = [mark.max_length for mark in metadata if isinstance(mark, Len | MaxLen)]
    return f", at most {longest[0]:,}" if longest else ""


def _bounds(metadata: tuple[Any, ...]) -> str:
    bounds: dict[str, Any] = {}
    for mark in metadata:
        if isinstance(mark, Ge | Gt | Le | Lt | Interval):
            bounds |= {name: bound for name, bound in asdict(mark).items() if bound is not None}
    if bounds.get("le") == MAX_INT:
        del bounds["le"]  # the limit of floats needs no mention
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    phrases = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    parts = [f"{phrases[name]} {bounds[name]}" for name in phrases if name in bounds]
    return f" {' and '.join(parts)}" if parts else ""


def _choices(annotation: Any) -> list[str]:
    """Return the strings in the Literals of a type."""
    if typing.get_origin(annotation) is Literal:
        return [choice for choice in typing.get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in typing.get_args(annotation) for choice in _choices(inner)]


def syntax_problem(path: str, text: str, error: Exception) -> Problem:
    """Describe a text that is not valid TOML: a duplicate key, or the error of tomllib."""
    first_line: dict[Path, int] = {}
    for parts, line in key_lines(text):
        if parts in first_line:
            key = ".".join(parts)
            return Problem(
                f"{path}:{line}: {key} is set twice, first in line {first_line[parts]}",
                "remove one of the two",
            )
        first_line[parts] = line
    message, _, position = str(error).partition(" (at ")
    match = re.search(r"line (\d+)", position)
    lines = text.split("\n")
    line = int(match.group(1)) if match else len(text.rstrip().split("\n"))
    excerpt = lines[line - 1].strip()[:200]
    return Problem(
        f"{path}:{line}: not valid TOML: {message}: {excerpt}",
        "strings need quotes, booleans are true and false, lists are [a, b]",
    )


def similar_file(path: str) -> str:
    """Suggest a file or preset that may be meant by ``path``, which does not exist."""
    if not path.endswith(".toml"):
        return did_you_mean(path, presets.names(), "`llama-toolkit configs` lists the presets")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist either; paths are relative to {os.getcwd()}"
    names = [name for name in os.listdir(folder) if name.endswith(".toml")]
    present = ", ".join(sorted(names)) or "no TOML file"
    return did_you_mean(os.path.basename(path), names, f"{os.path.abspath(folder)} contains {present}")
