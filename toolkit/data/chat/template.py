"""Chat templates in jinja: what comes with a Hugging Face model, or a file of the user's.

A template writes the names of special tokens into its text. To keep messages from doing the same, a character
that occurs nowhere else is put into every special token's name that a message holds, and is taken out again
after the rendered text was cut at the names that the template wrote.

Templates come with downloaded models: they run in jinja's sandbox, where nothing can be reached or changed
but the values handed in. Names and filters are those that transformers offers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.data.chat.base import ChatFormat, Message
from toolkit.data.tokenizers.files import read_json
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

_PRIVATE_USE = range(0xE000, 0xF8FF)


class ChatTemplate(ChatFormat):
    """A jinja template over ``messages``, ``add_generation_prompt`` and the names of special tokens.

    ``variables`` are further names that the template may use, such as ``date_string``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        name: str = "template",
        variables: Mapping[str, Any] | None = None,
    ):
        self.name = name
        self._source = source
        self._tokenizer = tokenizer
        named = _named_tokens(tokenizer)
        self._variables = {"tools": None, "documents": None, **named, **(variables or {})}
        ends = {tokenizer.special_tokens[token] for token in [named["eos_token"]] if token}
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *ends}))
        by_length = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"chat template {name}: {error}") from error

    @classmethod
    def from_file(
        cls, tokenizer: Tokenizer, path: Path, *, variables: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """The template in ``path``.

        Raises:
            DataError: no such file, or no template.
        """
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template {str(path)!r}: {error}") from error
        return cls(tokenizer, source, name=str(path), variables=variables)

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        if not messages:
            raise DataError("a dialog needs at least one message")
        mark = _unused_character(self._source + json.dumps([*messages], ensure_ascii=False, default=str))
        kept = _in_strings(
            [dict(message) for message in messages],
            lambda text: self._special.sub(lambda found: found[0][:1] + mark + found[0][1:], text),
        )
        try:
            text = self._template.render(
                messages=kept, add_generation_prompt=generation_prompt, **self._variables
            )
        except Exception as error:  # whatever an expression of the template raises
            raise DataError(f"chat template {self.name}: {error}") from error
        return self._ids(text, mark)

    def _ids(self, text: str, mark: str) -> list[int]:
        first, *rest = self._special.split(text)
        ids = self._tokenizer.encode(first.replace(mark, "")) if first else []
        for name, following in zip(self._special.findall(text), rest, strict=True):
            special = self._tokenizer.special_tokens[name]
            ids.append(special)
            if following:
                ids += self._tokenizer.encode_after(special, following.replace(mark, ""))
        return ids


def template_beside(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the tokenizer's folder: chat_template.jinja, or what tokenizer_config.json holds."""
    folder = tokenizer.folder
    if (file := folder / "chat_template.jinja").is_file():
        return ChatTemplate.from_file(tokenizer, file)
    held = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(held, list):  # several, by name
        held = {entry.get("name"): entry.get("template") for entry in held}.get("default")
    if not isinstance(held, str):
        return None
    return ChatTemplate(tokenizer, held, name=str(folder / "tokenizer_config.json"))


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token and so on: as tokenizer_config.json names them, else as the tokenizer does."""
    by_id = {token: name for name, token in tokenizer.special_tokens.items()}
    known = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: by_id[token] if token is not None else "" for role, token in known.items()}
    for role, token in read_json(tokenizer.folder / "tokenizer_config.json").items():
        name = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(name, str) and name in tokenizer.special_tokens:
            names[role] = name
    return names


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for loss masks; here its content is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unused_character(text: str) -> str:
    """A character of Unicode's private use that ``text`` does not hold."""
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in text)


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string in it changed, save the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _in_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_strings(item, change) for item in value]
    return value
