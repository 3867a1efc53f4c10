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
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.config.local_paths import read_text
from toolkit.data.chat.render import BEGIN, END, LimitedTemplate, RenderError
from toolkit.data.chat.think_block import DIALOG, SWITCH, AnswerPrompts, Render, no_empty_thinking
from toolkit.data.chat.unwritten import UnwrittenKeys
from toolkit.data.tokenizers.files import TEMPLATE, TOOL_USE, declared
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.io.json_fields import read_if_there
from toolkit.models.common.chat_format import ChatFormat, Message, Rendered, Turns, Unwritten

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


class ChatTemplate(ChatFormat):
    """A jinja template over ``messages``, ``add_generation_prompt`` and the names of special tokens.

    ``variables`` are further names that the template may use, such as ``date_string``. For ``training`` the
    day that it may ask for is always that of :data:`TRAINING_DAY`. A dialog with tools is laid out by
    ``tool_use``, if there is one. With ``mask_empty_thinking`` an answer begins behind the empty think block
    that the template writes.
    """

    _tokenizer: Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        name: str = "template",
        variables: Mapping[str, Any] | None = None,
        training: bool = False,
        mask_empty_thinking: bool = False,
        tool_use: ChatTemplate | None = None,
    ):
        self.name = name
        self._source = source
        self._tokenizer = tokenizer
        self._tool_use = tool_use
        self._unwritten = UnwrittenKeys()
        named = _named_tokens(tokenizer)
        self._variables = {"tools": None, "documents": None, **named, **(variables or {})}
        told = [source, self._variables, tool_use and tool_use.fingerprint]
        self.fingerprint = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        ends = {tokenizer.special_tokens[token] for token in [named["eos_token"]] if token}
        self._known_stops = {*tokenizer.stop_ids, *ends}
        by_length = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, by_length)) or "(?!)")
        self._template = compiled(name, source, TRAINING_DAY if training else None)
        self._prompts = AnswerPrompts(switches=SWITCH in self._template.used, masks_empty=mask_empty_thinking)

    @property
    def used(self) -> set[str]:
        """The variables that the template, or that for dialogs with tools, uses."""
        return self._template.used | (self._tool_use.used if self._tool_use else set())

    @property
    def has_empty_thinking(self) -> bool:
        """Say if the template opens an answer in another way where the model is not to think."""
        render = partial(self._render, marks=self._marks(DIALOG))
        with_tools = self._tool_use is not None and self._tool_use.has_empty_thinking
        return self._prompts.differ(render) or with_tools

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:  # type: ignore[override]  # found when it is asked for
        """Those that the tokenizer names, and the special token that the template writes behind an answer."""
        try:
            ids, answers = self.encode_turns(DIALOG)
        except DataError:  # no dialog for this template
            return tuple(sorted(self._known_stops))
        written = {ids[end - 1] for _, end in answers} & set(self._tokenizer.special_tokens.values())
        with_tools = self._tool_use.stop_ids if self._tool_use else ()
        return tuple(sorted({*self._known_stops, *written, *with_tools}))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        if tools and self._tool_use:
            return self._tool_use.encode(messages, generation_prompt=generation_prompt, tools=tools)
        marks = self._marks(messages, tools)
        rendered = self._render(messages, marks, generation_prompt=generation_prompt, tools=tools)
        return [token for text, after in _runs(rendered) for token in self._ids(text, after)]

    def encode_turns(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Turns:
        if tools and self._tool_use:
            return self._tool_use.encode_turns(messages, tools)
        render = partial(self._render, marks=self._marks(messages, tools), tools=tools)
        rendered = render(messages, generation_prompt=False)
        if _GENERATION.search(self._source):
            places = self._prompts.without(rendered, messages, render)
        else:
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

    def unwritten(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Unwritten, ...]:
        if tools and self._tool_use:
            return self._tool_use.unwritten(messages, tools)
        marks = self._marks(messages, tools)

        def text(some: Sequence[Message], of: Sequence[Any] | None) -> str:
            return self._render(some, marks, generation_prompt=False, tools=of).text

        return self._unwritten.find(messages, tools, text)

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
        thinking: bool | None = None,
    ) -> Rendered:
        def kept(value: Any) -> Any:
            return _in_strings(
                value,
                lambda text: self._special.sub(lambda found: found[0][:1] + marks.text + found[0][1:], text),
            )

        variables = self._variables | ({"tools": kept(tools)} if tools else {})
        variables |= {} if thinking is None else {SWITCH: thinking}
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

    def _without_marks(self, text: str, marks: _Marks) -> Rendered:
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
        return Rendered(found, special, list(zip(begins, ends, strict=True)))

    def _answer(
        self, messages: Sequence[Message], index: int, full: Rendered, render: Render
    ) -> tuple[int, int]:
        """The place of message ``index`` in the dialog: from where its prompt ends to the special token
        that ends it, or to where the next message begins if there is none."""
        if index == 0:
            raise DataError(f"chat template {self.name}: the assistant speaks first\n  fix:  {_MARK_IT}")
        through = render(messages[: index + 1], generation_prompt=False)
        begin = self._prompts.end(messages[:index], [full, through], render)
        if begin is None:
            raise DataError(
                f"chat template {self.name}: message {index + 1} does not begin with the generation prompt, "
                f"or what is before it changes with it\n  fix:  {_MARK_IT}"
            )
        alone, here = (
            [(name, place) for name, place in it.named() if place >= begin] for it in (through, full)
        )
        common, ends_dialog = [], False
        for (name, place), (other, at) in zip(alone, here, strict=False):
            text = through.text[begin:place]
            more = full.text[begin:at].removeprefix(text) if full.text.startswith(text, begin) else ""
            ends_dialog = name == other and bool(more.strip())  # other messages stand before it
            if name != other or ends_dialog:
                break
            common.append((name, at))
        if common:  # what follows them ends the whole dialog, or is the next message
            name, place = common[-1]
            return begin, place + len(name)
        if ends_dialog:
            return begin, alone[0][1]
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

    def _ids_with_offsets(self, rendered: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
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


def _runs(rendered: Rendered) -> list[tuple[str, str]]:
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


def compiled(name: str, source: str, day: datetime | None = None) -> LimitedTemplate:
    """The template, which ``day`` is told as today, if any.

    Raises:
        DataError: it is no template.
    """
    try:
        return LimitedTemplate(source, day)
    except RenderError as error:
        raise DataError(f"chat template {name}, {error}\n  fix:  correct the template") from error


def refuse_unused(
    name: str, used: Collection[str], variables: Mapping[str, Any], mask_empty_thinking: bool = False
) -> None:
    """See that the template ``name``, which uses these variables, uses the given ones.

    Raises:
        DataError: it does not.
    """
    if unused := [variable for variable in variables if variable not in used]:
        raise DataError(
            f"chat template {name} has no variable {unused[0]!r}\n"
            f"  fix:  remove it; the template uses {', '.join(sorted({*used} - {BEGIN, END}))}"
        )
    if mask_empty_thinking and SWITCH not in used:
        raise no_empty_thinking(f"chat template {name}", f"has no variable {SWITCH!r}")


def template_beside(tokenizer: Tokenizer, **options: Any) -> ChatTemplate | None:
    """The template of the tokenizer's folder, with that for dialogs with tools, if there is one: those of
    chat_template.jinja and additional_chat_templates/tool_use.jinja, else of tokenizer_config.json.

    Raises:
        DataError: one cannot be read, or there are several and no default.
    """
    folder = tokenizer.folder
    config = folder / "tokenizer_config.json"
    files = {"default": folder / TEMPLATE, "tool_use": folder / TOOL_USE}
    texts = {kind: read_template(file) for kind, file in files.items() if os.path.lexists(file)}
    names = {kind: str(files[kind]) for kind in texts}
    if "default" not in texts:
        held = read_if_there(config).get("chat_template")
        entries = held if isinstance(held, list) else [{"name": "default", "template": held}]
        for entry in entries:
            kind, text = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
            if isinstance(kind, str) and isinstance(text, str) and kind not in texts:
                texts[kind] = text
                names[kind] = f"{config}" if kind == "default" else f"{config} ({kind})"
    if not texts:
        return None
    if "default" not in texts:
        raise DataError(
            f"{folder} has chat templates named {', '.join(texts)} and none named default\n"
            "  fix:  write the one to use into a file, and name that in data.chat_template (tools.chat: "
            "--format)"
        )
    tool_use = None
    if "tool_use" in texts:
        tool_use = ChatTemplate(tokenizer, texts["tool_use"], name=names["tool_use"], **options)
    return ChatTemplate(tokenizer, texts["default"], name=names["default"], tool_use=tool_use, **options)


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
