"""Generate the site's reference of config keys from the schema: a hook of mkdocs, named in mkdocs.yml.

Keys and commands that a page names in code become links to their entries.
"""

from __future__ import annotations

import posixpath
import re
import typing
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from toolkit.commands import COMMANDS, NAME
from toolkit.config.help import conditions, default_text, short_type
from toolkit.config.schema import Field, fields, fields_by_key, tables
from toolkit.config.types import MAX_INT
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.config.values import format_toml

_CONFIG, _COMMANDS = "reference/config", "reference/commands.md"
_GROUPS = list(dict.fromkeys(name.partition(".")[0] for name in tables()))
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "length at most"}
_KEY = re.compile(r"\b[a-z][a-z_0-9]*(?:\.[A-Za-z_0-9]+)+\b")
_CODE = re.compile(rf"(?<![\[`])`(?:({_KEY.pattern})(?: = [^`]+)?|{NAME} ([a-z-]+)[^`]*)`(?![`\]])")


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of the config to the section Reference of the navigation."""
    (section,) = (item["Reference"] for item in config.nav or [] if "Reference" in item)
    section.insert(0, {"Configuration": list(_pages())})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of the config."""
    for path, text in _pages().items():
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


def _pages() -> dict[str, str]:
    """Return the generated pages by path."""
    pages = {f"{_CONFIG}/{group}.md": _group(group) for group in _GROUPS}
    return pages | {f"{_CONFIG}/unsupported.md": _unsupported()}


def _group(group: str) -> str:
    """Return the page of a table of the config and of those nested in it."""
    lines: list[str] = []
    for name, table in tables().items():
        if f"{name}.".startswith(f"{group}."):
            level = "##" if lines else "#"
            lines += [f"{level} [{name}] {{ #{name} }}", _prose(" ".join((table.__doc__ or "").split()))]
            lines += [_entry(field, f"{level}#") for field in fields() if field.table == name]
    return "\n\n".join(lines)


def _entry(field: Field, level: str) -> str:
    kind = short_type(field.annotation).replace("|", " | ")  # breaks on narrow screens
    facts = [f"`{kind}`", f"default `{default_text(field)}`", *_limits(field)]
    rejected = "; an error otherwise" if any(getattr(mark, "rejected", False) for mark in field.marks) else ""
    notes = [f"- {_prose(it[0].upper() + it[1:])}{rejected}." for it in conditions(field)]
    head = f"{level} {field.key} {{ #{field.key} }}"
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
    """Return a plain text as Markdown, with the keys and pages that it names linked."""
    text = re.sub(r"[*<\[\]]", lambda it: f"&#{ord(it[0])};", text)
    text = re.sub(r"\bdocs/(\w+)\.md", r"[\1](../../\1.md)", text)
    return _KEY.sub(lambda it: f"`{it[0]}`" if it[0] in fields_by_key() else it[0], text)


def _unsupported() -> str:
    text = "torchtitan's keys that this toolkit does not support. They are accepted at their default only."
    lines = ["# Unsupported keys", text]
    for key, (default, why) in UNSUPPORTED.items():
        lines += [f"## {key} {{ #{key} }}", f"default `{_toml(default)}`", f"Not supported: {_prose(why)}."]
    return "\n\n".join(lines)


def _toml(value: object) -> str:
    return "None" if value is None else format_toml(value)
