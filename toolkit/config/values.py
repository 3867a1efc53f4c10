"""Values of the schema's types: said in words, read from a flag, written as TOML."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Le, Lt

from toolkit.compat import tomllib
from toolkit.config.types import MAX_INT, NONE, allows_none

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {str: "strings", int: "integers", float: "numbers"}
_SHORT = {bool: "bool", int: "int", float: "float", str: "str", types.NoneType: NONE}


def in_words(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Complete "must be …" for a type, for example "an integer of at least 1"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return in_words(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        alternatives = [in_words(a, metadata) for a in arguments if a is not types.NoneType]
        return " or ".join([*alternatives, f'"{NONE}"'] if allows_none(annotation) else alternatives)
    if origin is Literal:
        choices = [json.dumps(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    if origin is dict:
        return 'a table of strings, such as {a = "b"}'
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


def _bounds(metadata: tuple[Any, ...]) -> str:
    bounds: dict[str, Any] = {}
    for mark in metadata:
        if isinstance(mark, Ge | Gt | Le | Lt | Interval):
            bounds |= {name: bound for name, bound in asdict(mark).items() if bound is not None}
    if bounds.get("le") == MAX_INT:
        del bounds["le"]  # whoever meets it knows why
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    phrases = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    said = [f"{phrases[name]} {bounds[name]}" for name in phrases if name in bounds]
    return f" {' and '.join(said)}" if said else ""


def short_type(annotation: Any) -> str:
    """Name a type for ``--help``: ``int``, ``a|b``, ``str,…`` for a list."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return short_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return "|".join(dict.fromkeys(short_type(a) for a in arguments))
    if origin is Literal:
        return "|".join(str(choice) for choice in arguments)
    if origin is list:
        return f"[{short_type(arguments[0])},…]"
    if origin is dict:
        return "{name=str,…}"
    return _SHORT[annotation]


def choices(annotation: Any) -> list[str]:
    """Return the strings that a type names."""
    if typing.get_origin(annotation) is Literal:
        return [choice for choice in typing.get_args(annotation) if isinstance(choice, str)]
    return [choice for inner in typing.get_args(annotation) for choice in choices(inner)]


def parse(text: str, annotation: Any) -> object:
    """Read a flag's ``text`` as a type of the schema; what cannot be read stays text, for validation."""
    for read in _readers(annotation):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _readers(annotation: Any) -> list[Callable[[str], object]]:
    """Ways to read a text as ``annotation``, each raising ValueError; none for a string, which is read."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _readers(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [reader for alternative in arguments for reader in _readers(alternative)]
    if origin is list:
        return [lambda text: _read_list(text, arguments[0])]
    if origin is dict:
        return [_read_table]
    if origin is Literal:
        return [int] if any(isinstance(choice, int) for choice in arguments) else []
    reader = _READERS.get(annotation)
    return [reader] if reader else []


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _read_none(text: str) -> None:
    if text != NONE:
        raise ValueError(text)


_READERS: dict[Any, Callable[[str], object]] = {
    bool: _read_bool,
    int: int,
    float: float,
    types.NoneType: _read_none,
}


def _read_list(text: str, element: Any) -> list[Any]:
    if text.lstrip().startswith("["):
        try:
            value: list[Any] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError) as error:
            raise ValueError(text) from error
        return value
    if typing.get_origin(element) is list:
        raise ValueError(text)
    return [parse(item.strip(), element) for item in text.split(",")] if text else []


def _read_table(text: str) -> dict[str, Any]:
    """``name=value,…``, or an inline table of TOML."""
    if text.lstrip().startswith("{"):
        try:
            table: dict[str, Any] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ValueError(text) from error
        return table
    pairs = [item.partition("=") for item in text.split(",")] if text else []
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError(text)
    return {name.strip(): value.strip() for name, _, value in pairs}


def format_toml(value: object) -> str:
    """Write one value as TOML; None, which TOML lacks, as the string "None"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, list):
        return f"[{', '.join(format_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_string(k)} = {format_toml(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, str):
        return _format_string(NONE if value is None else value)
    return str(value)


def _format_float(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _format_string(value: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped and knows no surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def dotted(toml: str) -> dict[str, Any]:
    """The values of a TOML document by dotted key."""

    def values(table: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in table.items():
            found |= (
                values(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
            )
        return found

    return values(tomllib.loads(toml), "")
