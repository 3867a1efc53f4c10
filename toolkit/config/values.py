"""Parsing of flags and formatting of TOML values, by the schema's types."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from toolkit.config.toml_text import parse_toml
from toolkit.config.types import NONE


@dataclass(frozen=True)
class Setting:
    """A value and its origin: "file.toml:12" or "--table.key".

    ``depth`` is 0 for a flag, 1 for the config file and one more for each file that it extends.
    """

    value: object
    origin: str
    depth: int = 0


def parse(text: str, annotation: Any) -> object:
    """Parse a flag's ``text`` as a type of the schema; invalid text is returned as is, for validation."""
    for read in _readers(annotation):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _readers(annotation: Any) -> list[Callable[[str], object]]:
    """Return functions that parse a text as ``annotation`` or raise ValueError; none for plain strings."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _readers(arguments[0])
    if origin in (typing.Union, types.UnionType):
        first_none = sorted(arguments, key=lambda alternative: alternative is not types.NoneType)
        return [reader for alternative in first_none for reader in _readers(alternative)]
    if origin is list:
        return [lambda text: _read_list(text, arguments[0])]
    if origin is dict:
        return [lambda text: _read_table(text, arguments[1])]
    if origin is Literal:
        return [int] if any(isinstance(choice, int) for choice in arguments) else []
    reader = _READERS.get(annotation)
    return [reader] if reader else []


def takes_pairs(annotation: Any) -> bool:
    """Return whether a flag of this type is written as ``name=value,…``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(map(takes_pairs, arguments))
    return origin is dict


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
        value: list[Any] = parse_toml(f"value = {text}")["value"]
        return value
    if typing.get_origin(element) is list:
        raise ValueError(text)
    return [parse(item.strip(), element) for item in text.split(",")] if text else []


def _read_table(text: str, element: Any) -> dict[str, Any]:
    """Parse ``name=value,…`` or an inline table of TOML."""
    if text.lstrip().startswith("{"):
        table: dict[str, Any] = parse_toml(f"value = {text}")["value"]
        return table
    pairs = [item.partition("=") for item in text.split(",")] if text else []
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError(text)
    return {name.strip(): parse(value.strip(), element) for name, _, value in pairs}


def format_toml(value: object) -> str:
    """Format one value as TOML; None, which TOML lacks, as the string "None"."""
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
    # JSON's escapes are valid in TOML, but TOML also needs DEL escaped and has no surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
