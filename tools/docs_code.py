"""Generate the site's reference of commands and of the Python API: a hook of mkdocs, named in mkdocs.yml.

A command's entry is its ``--help``, that of a function or class its signature and docstring.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import toolkit
from toolkit import api
from toolkit.commands import COMMANDS, NAME, Command
from toolkit.config.schema import tables


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the two pages."""
    for name, text in {"commands": _commands(), "python": _python()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))


def _commands() -> str:
    rows = [f"| `{NAME} {name}` | {command.help} |" for name, command in COMMANDS.items()]
    lines = ["---\nhide: [toc]\n---\n# Commands", "\n".join(["| command | task |", "|---|---|", *rows])]
    for name, command in COMMANDS.items():
        lines += [f"## {NAME} {name} {{ #{name} }}", f"```{{ .text .wrap }}\n{_help(name, command)}\n```"]
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
    first, *_ = tables()
    return printed.getvalue().partition(f"\n[{first}]")[0].strip()


def _python() -> str:
    lines = ["# Python", _docstring(api)]
    for name in toolkit.__all__:
        thing = getattr(toolkit, name)
        lines += [f"## toolkit.{name} {{ #{name} }}"]
        lines += [_signature(name, thing)] if thing is not toolkit.Config else []  # its tables have pages
        lines += [_docstring(thing)]
    return "\n\n".join(lines)


def _signature(name: str, thing: Any) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"{name}{inspect.signature(thing)}")
    return f"```{{ .python .wrap }}\n{text}\n```"


def _docstring(thing: object) -> str:
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", inspect.getdoc(thing) or "")
    text = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"\bdocs/(\w+)\.md", r"[\1](../\1.md)", text)
    return text.replace("Raises:\n", "Raises:\n\n")
