"""Chat templates in jinja: what comes with a Hugging Face model, or a file of the user's.

A template writes the names of special tokens into its text. To keep messages from doing the same, a character
that occurs nowhere else is put into every special token's name that a message holds, and is taken out again
after the rendered text was cut at the names that the template wrote.

Templates come with downloaded models: they run in jinja's sandbox, where nothing can be reached or changed
but the values handed in, and in a process of limited time and memory
(:mod:`toolkit.data.chat.render`). Names and filters are those that transformers offers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.config.local_paths import read_text
from toolkit.data.chat.base import ChatFormat, Message, Turns
from toolkit.data.chat.render import BEGIN, END, LimitedTemplate, RenderError
from toolkit.data.tokenizers.files import declared, read_json
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

TRAINING_DAY = datetime(2024, 7, 26)
"""The day that a template is told in training, so that a cache does not depend on when it was made."""
_MAX_BYTES = 1_000_000  # of a template
_PRIVATE_USE = range(0xE000, 0xF8FF)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which data sets have what is thought before an answer."""


class _Marks(NamedTuple):
    """Characters that neither the template nor the messages hold: in names of special tokens that messages
    hold, and where what ``{% generation %}`` marks begins and ends."""

    text: str
    begin: str
    end: str


class _Rendered(NamedTuple):
    """A dialog as ``text`` without marks; ``special`` are the places of the special tokens that the
    template wrote, ``generated`` those of what it marks as the assistant's."""

    text: str
    special: list[tuple[int, int]]
    generated: list[tuple[int, int]]

    def named(self) -> list[tuple[str, int]]:
        """The special tokens, with where they begin."""
        return [(self.text[begin:end], begin) for begin, end in self.special]


class ChatTemplate(ChatFormat):
    """A jinja template over ``messages``, ``add_generation_prompt`` and the names of special tokens.

    ``variables`` are further names that the template may use, such as ``date_string``. For ``training`` the
    day that it may ask for is always that of :data:`TRAINING_DAY`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        name: str = "template",
        variables: Mapping[str, Any] | None = None,
        training: bool = False,
    ):
        self.name = name
        self._source = source
        self._tokenizer = tokenizer
        named = _named_tokens(tokenizer)
        self._variables = {"tools": None, "documents": None, **named, **(variables or {})}
        told = json.dumps([source, self._variables], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()
        ends = {tokenizer.special_tokens[token] for token in [named["eos_token"]] if token}
        self._known_stops = {*tokenizer.stop_ids, *ends}
        by_length = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
        self._template = compiled(name, source, variables or {}, TRAINING_DAY if training else None)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:  # type: ignore[override]  # found when it is asked for
        """Those that the tokenizer names, and the special token that the template writes behind an answer."""
        try:
            ids, answers = self.encode_turns(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            )
        except DataError:  # no dialog for this template
            return tuple(sorted(self._known_stops))
        written = {ids[end - 1] for _, end in answers} & set(self._tokenizer.special_tokens.values())
        return tuple(sorted(self._known_stops | written))

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        rendered = self._render(messages, self._marks(messages), generation_prompt=generation_prompt)
        return [token for text, after in _runs(rendered) for token in self._ids(text, after)]

    @property
    def takes_tools(self) -> bool:
        """Say if the template writes the functions that a model may call."""
        return "tools" in self._template.used

    def encode_turns(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Turns:
        marks = self._marks(messages, tools)
        render = partial(self._render, marks=marks, tools=tools)
        rendered = render(messages, generation_prompt=False)
        places = rendered.generated
        if not _GENERATION.search(self._source):
            roles = [message.get("role") for message in messages]
            places = [
                self._answer(messages, index, rendered, render)
                for index, role in enumerate(roles)
                if role == "assistant"
            ]
        ids, offsets = self._ids_with_offsets(rendered)
        answers = [_tokens_at(offsets, place) for place in places]
        special = set(self._tokenizer.special_tokens.values())
        for begin, end in answers:
            ended = any(token in special for token in ids[begin:end])
            if end < len(ids) and ids[end] in self._known_stops and not ended:
                raise DataError(
                    f"chat template {self.name}: an answer is marked without the token after it, "
                    f"{self._tokenizer.decode([ids[end]])}, by which a model ends its turn\n"
                    "  fix:  put {% endgeneration %} behind that token"
                )
        return Turns(ids, answers)

    def _marks(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> _Marks:
        if not messages:
            raise DataError("a dialog needs at least one message")
        held = set(self._source + json.dumps([*messages, tools], ensure_ascii=False, default=str))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in held)
        return _Marks(next(free), next(free), next(free))

    def _render(
        self,
        messages: Sequence[Message],
        marks: _Marks,
        *,
        generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> _Rendered:
        def kept(value: Any) -> Any:
            return _in_strings(
                value,
                lambda text: self._special.sub(lambda found: found[0][:1] + marks.text + found[0][1:], text),
            )

        variables = self._variables | ({"tools": kept(tools)} if tools else {})
        places = {BEGIN: marks.begin, END: marks.end}
        try:
            text = self._template.render(
                messages=kept([_with_reasoning(message) for message in messages]),
                add_generation_prompt=generation_prompt,
                **variables,
                **places,
            )
        except RenderError as error:
            raise DataError(f"chat template {self.name}: {error}") from error
        return self._without_marks(text, marks)

    def _without_marks(self, text: str, marks: _Marks) -> _Rendered:
        found, special, begins, ends = "", [], [], []
        for part in re.split(f"([{''.join(marks)}]|{self._special.pattern})", text):
            if part == marks.begin:
                begins.append(len(found))
            elif part == marks.end:
                ends.append(len(found))
            elif part != marks.text:
                if self._special.fullmatch(part):
                    special.append((len(found), len(found) + len(part)))
                found += part
        return _Rendered(found, special, list(zip(begins, ends, strict=True)))

    def _answer(
        self, messages: Sequence[Message], index: int, full: _Rendered, render: Callable[..., _Rendered]
    ) -> tuple[int, int]:
        """The place of message ``index`` in the dialog: from where its prompt ends to the special token
        that ends it, or to where the next message begins if there is none."""
        if index == 0:
            raise DataError(f"chat template {self.name}: the assistant speaks first\n  fix:  {_MARK_IT}")
        before = render(messages[:index], generation_prompt=True).text
        through = render(messages[: index + 1], generation_prompt=False)
        if not full.text.startswith(before) or not through.text.startswith(before):
            raise DataError(
                f"chat template {self.name}: message {index + 1} does not begin with the generation prompt, "
                f"or what is before it changes with it\n  fix:  {_MARK_IT}"
            )
        begin = len(before)
        alone = [name for name, place in through.named() if place >= begin]
        here = [(name, place) for name, place in full.named() if place >= begin]
        common = list(takewhile(lambda pair: pair[0] == pair[1][0], zip(alone, here, strict=False)))
        if common:  # what follows them ends the whole dialog, or is the next message
            name, place = common[-1][1]
            return begin, place + len(name)
        if alone or not full.text.startswith(through.text):
            raise DataError(
                f"chat template {self.name}: the end of message {index + 1} cannot be told\n"
                f"  fix:  {_MARK_IT}"
            )
        return begin, len(through.text)

    def _ids(self, text: str, after: str) -> list[int]:
        """Ids of the text that follows a special token, and before them that token; ``after`` may be
        nothing."""
        if not after:
            return self._tokenizer.encode(text) if text else []
        special = self._tokenizer.special_tokens[after]
        return [special, *(self._tokenizer.encode_after(special, text) if text else [])]

    def _ids_with_offsets(self, rendered: _Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets, place = [], [], 0
        for text, after in _runs(rendered):
            special = self._tokenizer.special_tokens[after] if after else None
            if special is not None:
                ids.append(special)
                offsets.append((place, place + len(after)))
                place += len(after)
            if text:
                of_text, inside = self._tokenizer.encode_with_offsets(text, special)
                ids += of_text
                offsets += [(place + begin, place + end) for begin, end in inside]
                place += len(text)
        return ids, offsets


def _runs(rendered: _Rendered) -> list[tuple[str, str]]:
    """The texts between special tokens, each with the name of the token before it, the first with none."""
    text, found, place, after = rendered.text, [], 0, ""
    for begin, end in rendered.special:
        found.append((text[place:begin], after))
        place, after = end, text[begin:end]
    return [*found, (text[place:], after)]


def _tokens_at(offsets: Sequence[tuple[int, int]], place: tuple[int, int]) -> tuple[int, int]:
    """The tokens that hold the characters of ``place``; one that holds others too is one of them."""
    begin, end = (bisect_left(offsets, at, key=itemgetter(0)) for at in place)
    # A token may end within a character: a space and the first bytes of an emoji may be one.
    while place[0] < place[1] and begin and offsets[begin - 1][1] > place[0]:
        begin -= 1
    return begin, max(begin, end)


def read_template(path: Path) -> str:
    """The text of the template in ``path``.

    Raises:
        DataError: no such file, or no text.
    """
    try:
        return read_text(path, at_most=_MAX_BYTES)
    except OSError as error:
        raise DataError(f"chat template {str(path)!r}: {error.strerror}") from error


def compiled(
    name: str, source: str, variables: Mapping[str, Any], day: datetime | None = None
) -> LimitedTemplate:
    """The template, which ``day`` is told as today, if any.

    Raises:
        DataError: it is no template, or does not use one of ``variables``.
    """
    try:
        template = LimitedTemplate(source, day)
    except RenderError as error:
        raise DataError(f"chat template {name}, {error}\n  fix:  correct the template") from error
    if unused := [variable for variable in variables if variable not in template.used]:
        raise DataError(
            f"chat template {name} has no variable {unused[0]!r}\n"
            f"  fix:  remove it; the template uses {', '.join(sorted(template.used - {BEGIN, END}))}"
        )
    return template


def template_beside(tokenizer: Tokenizer, **options: Any) -> ChatTemplate | None:
    """The template of the tokenizer's folder: chat_template.jinja, or what tokenizer_config.json holds."""
    folder = tokenizer.folder
    if os.path.lexists(file := folder / "chat_template.jinja"):
        return ChatTemplate(tokenizer, read_template(file), name=str(file), **options)
    held = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(held, list):  # several, by name
        named = [entry for entry in held if isinstance(entry, dict) and entry.get("name") == "default"]
        held = named[-1].get("template") if named else None
    if not isinstance(held, str):
        return None
    return ChatTemplate(tokenizer, held, name=str(folder / "tokenizer_config.json"), **options)


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token and so on: as the files beside the tokenizer name them, else as it does."""
    by_id = {token: name for name, token in tokenizer.special_tokens.items()}
    known = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: by_id[token] if token is not None else "" for role, token in known.items()}
    for role, token in declared(tokenizer.folder).items():
        name = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(name, str) and name in tokenizer.special_tokens:
            names[role] = name
    return names


_MARK_IT = "put {% generation %} and {% endgeneration %} around what the assistant writes in it"


def _with_reasoning(message: Message) -> dict[str, Any]:
    """The message with its reasoning under the names by which templates ask for it, as transformers does."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string in it changed, save the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _in_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_strings(item, change) for item in value]
    return value
