"""Generate the reference of the documentation site: a hook of mkdocs, which mkdocs.yml names.

Pages of config keys come from the schema, of commands from their ``--help``, of the Python API from its
docstrings. Keys and commands that other pages name in code become links to them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import posixpath
import re
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import toolkit
from toolkit.commands import COMMANDS, NAME, Command
from toolkit.config.help import conditions, default_text, short_type
from toolkit.config.schema import Field, fields, fields_by_key, tables
from toolkit.config.types import MAX_INT
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.config.values import format_toml

_CONFIG, _COMMANDS, _PYTHON = "reference/config", "reference/commands.md", "reference/python.md"
_UNSUPPORTED = f"{_CONFIG}/unsupported.md"
_GROUPS = [name for name in tables() if "." not in name]
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "length at most"}
_KEY = re.compile(r"\b[a-z][a-z_0-9]*(?:\.[A-Za-z_0-9]+)+\b")
_CODE = re.compile(rf"(?<![\[`])`(?:({_KEY.pattern})(?: = [^`]+)?|{NAME} ([a-z-]+)[^`]*)`(?![`\]])")


def on_config(config: MkDocsConfig) -> None:
    """Add the reference to the navigation."""
    pages = [*(f"{_CONFIG}/{group}.md" for group in _GROUPS), _UNSUPPORTED]
    config.nav.append({"Reference": [{"Configuration": pages}, _COMMANDS, _PYTHON]})  # type: ignore[union-attr]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    pages = {f"{_CONFIG}/{group}.md": _group(group) for group in _GROUPS}
    pages |= {_UNSUPPORTED: _unsupported(), _COMMANDS: _commands(), _PYTHON: _python()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Link the keys and commands that a page names in code, outside headings and code blocks."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        key, command = found.groups()
        if key in fields_by_key() or key in tables():
            target = f"{_CONFIG}/{key.partition('.')[0]}.md#{key}"
        elif command in COMMANDS:
            target = f"{_COMMANDS}#{command}"
        else:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(target, folder or '.')})"

    parts = re.split(r"(^```.*?^```$|^#.*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith(("```", "#")) else _CODE.sub(link, part) for part in parts)


def _group(group: str) -> str:
    """Return the page of a table of the config and of those nested in it."""
    lines = [f"# {group}"]
    for name, table in tables().items():
        if f"{name}.".startswith(f"{group}."):
            lines += [f"## [{name}] {{ #{name} }}", _prose(" ".join((table.__doc__ or "").split()))]
            lines += [_entry(field) for field in fields() if field.table == name]
    return "\n\n".join(lines)


def _entry(field: Field) -> str:
    facts = [f"`{short_type(field.annotation)}`", f"default `{default_text(field)}`", *_limits(field)]
    rejected = "; an error otherwise" if any(getattr(mark, "rejected", False) for mark in field.marks) else ""
    notes = [f"- {_prose(it[0].upper() + it[1:])}{rejected}." for it in conditions(field)]
    head = f"### {field.key} {{ #{field.key} }}"
    return "\n\n".join([head, ", ".join(facts), _prose(field.description), "\n".join(notes)])


def _limits(field: Field) -> Iterator[str]:
    """Yield the bounds that the annotation and the marks of a field state."""
    marks, annotations = list(field.marks), [field.annotation]
    while annotations:
        annotation = annotations.pop()
        marks += getattr(annotation, "__metadata__", ())
        annotations += typing.get_args(annotation)
    for mark in marks:
        for name, word in _BOUNDS.items():
            if (value := getattr(mark, name, None)) not in (None, MAX_INT):
                yield f"{word} {value:,}"
        if getattr(mark, "storage", False):
            yield "local or in object storage"


def _prose(text: str) -> str:
    """Return a plain text as Markdown, with its keys linked."""
    text = re.sub(r"[*<\[\]]", lambda it: f"&#{ord(it[0])};", text)
    return _KEY.sub(lambda it: f"`{it[0]}`" if it[0] in fields_by_key() else it[0], text)


def _unsupported() -> str:
    rows = [f"| `{key}` | `{_toml(value)}` | {_prose(why)} |" for key, (value, why) in UNSUPPORTED.items()]
    text = "torchtitan's keys that this toolkit does not support. They are accepted at their default only."
    return "\n".join(["# Unsupported keys", "", text, "", "| key | default | why |", "|---|---|---|", *rows])


def _toml(value: object) -> str:
    return "None" if value is None else format_toml(value)


def _commands() -> str:
    lines = ["# Commands", f"`{NAME} COMMAND`, or `python -m toolkit COMMAND`."]
    for name, command in COMMANDS.items():
        lines += [f"## {NAME} {name} {{ #{name} }}", f"```text\n{_help(name, command)}\n```"]
    return "\n\n".join(lines)


def _help(name: str, command: Command) -> str:
    """Return what ``--help`` of a command prints, without the keys, which have pages."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="80"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        command.main(name)(["--help"])
    return printed.getvalue().partition(f"\n[{_GROUPS[0]}]")[0].strip()


def _python() -> str:
    lines = ["# Python", _docstring(toolkit)]
    for name in toolkit.__all__:
        thing = getattr(toolkit, name)
        lines += [f"## toolkit.{name} {{ #{name} }}"]
        lines += [_signature(name, thing)] if thing is not toolkit.Config else []  # its tables have pages
        lines += [_docstring(thing)]
    return "\n\n".join(lines)


def _signature(name: str, thing: Any) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"{name}{inspect.signature(thing)}")
    return f"```python\n{text}\n```"


def _docstring(thing: object) -> str:
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", inspect.getdoc(thing) or "")
    text = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return text.replace("Raises:\n", "Raises:\n\n")
