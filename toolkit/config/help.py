"""The text of ``--help``, generated from the schema."""

from __future__ import annotations

import textwrap
import types
import typing
from typing import Annotated, Any, Literal

from toolkit.config.schema import Field, fields, schema_name, tables
from toolkit.config.types import NONE, Needs, OnlyWith, UnsupportedValues
from toolkit.config.values import format_toml
from toolkit.errors import ConfigError, Problem, did_you_mean

_USAGE = """\
usage: llama-toolkit train [CONFIG] [--table.key VALUE ...]
       llama-toolkit preflight [CONFIG] [--world-size N] [--table.key VALUE ...]

  CONFIG              a TOML file or a preset (same as --job.config_file CONFIG)

  --table.key VALUE   or --table.key=VALUE overrides a key of the file; booleans also as --table.key and
                      --table.no-key; lists as a,b; None where a key may be None; hyphens may replace
                      underscores
  --help [TABLE]      show this text, or the keys of one table
  --job.print_config  print the resolved config, with the origin of each value
  --debug             show tracebacks (same as --job.debug)
"""
_WIDTH = 100
_SHORT = {bool: "bool", int: "int", float: "float", str: "str", types.NoneType: NONE}


def help_text(table: str = "") -> str:
    """Return the keys of ``table`` and its nested tables, or all keys, with type, default and description.

    Raises:
        ConfigError: There is no such table.
    """
    inside = f"{schema_name(table)}."
    chosen = [field for field in fields() if not table or f"{field.key}.".startswith(inside)]
    if not chosen:
        raise ConfigError(
            Problem(
                f"there is no table [{table}]",
                did_you_mean(table, tables(), f"the tables are {', '.join(tables())}"),
                "--help",
                table,
                "command line",
            )
        )
    parts = [] if table else [_USAGE]
    current = ""
    for field in chosen:
        if field.table != current:
            current = field.table
            parts.append(f"\n[{current}]  {' '.join((tables()[current].__doc__ or '').split())}")
        parts.append(_entry(field))
    return "\n".join(parts)


def _entry(field: Field) -> str:
    head = f"  --{field.key} {short_type(field.annotation)}  (default {default_text(field)})"
    return "\n".join(
        [head, *textwrap.wrap(describe(field), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    )


def short_type(annotation: Any) -> str:
    """Abbreviate a type, as in ``int``, ``a|b`` or ``[str,…]``, a list."""
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
        return f"{{name={short_type(arguments[1])},…}}"
    return _SHORT[annotation]


def default_text(field: Field) -> str:
    """Return the default as TOML, or None."""
    return "None" if field.default is None else format_toml(field.default)


def describe(field: Field) -> str:
    """Return a key's description, with the conditions under which it has an effect."""
    return " ".join([field.description, *(f"[{condition}]" for condition in conditions(field))])


def conditions(field: Field) -> list[str]:
    """Return the values that a key does not support, and the conditions under which it has an effect."""
    unsupported = [mark for mark in field.marks if isinstance(mark, UnsupportedValues)]
    notes = [f"not {' or '.join(map(format_toml, mark.values))}: {mark.reason}" for mark in unsupported]
    switches = [str(mark) for mark in field.marks if isinstance(mark, OnlyWith)]
    only = [f"only with {' or '.join(dict.fromkeys(switches))}"] if switches else []
    return [*notes, *only, *(f"needs {mark.what}" for mark in field.marks if isinstance(mark, Needs))]
