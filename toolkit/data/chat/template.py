"""Jinja chat templates, from a Hugging Face model or a user's file.

A template inserts the names of special tokens into its text. Messages must not be able to do the same, so a
character that occurs nowhere else is inserted into every special token's name in a message. This character is
removed after the rendered text has been split at the names that the template wrote.

Templates come with downloaded models. Templates run in a process with time and memory limits
(:mod:`toolkit.data.chat.render`), in jinja's sandbox, which gives access only to the values passed in. Names
and filters are those of transformers.
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
"""Date passed to templates in training, so that a cache does not depend on when it was built."""
_MAX_BYTES = 1_000_000  # maximum size of a template
_PRIVATE_USE = range(0xE000, 0xF8FF)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which datasets store the reasoning before an answer."""


class _Marks(NamedTuple):
    """Characters that occur neither in the template nor in the messages: one to insert into names of special
    tokens in messages, and two around the content of ``{% generation %}``."""

    text: str
    begin: str
    end: str


class ChatTemplate(ChatFormat):
    """A jinja template over ``messages``, ``add_generation_prompt`` and the names of special tokens.

    ``variables`` are additional variables of the template, such as ``date_string``. In ``training`` the date
    is always :data:`TRAINING_DAY`. ``tool_use``, if given, is the template for dialogs with tools. With
    ``mask_empty_thinking``, an answer starts after the empty think block that the template inserts.
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
        """Variables used by the template, or by the template for dialogs with tools."""
        return self._template.used | (self._tool_use.used if self._tool_use else set())

    @property
    def has_empty_thinking(self) -> bool:
        """True if the template starts an answer differently when thinking is disabled."""
        render = partial(self._render, marks=self._marks(DIALOG))
        with_tools = self._tool_use is not None and self._tool_use.has_empty_thinking
        return self._prompts.differ(render) or with_tools

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:  # type: ignore[override]  # computed on demand
        """The tokenizer's stop tokens, and the special token that the template writes after an answer."""
        try:
            ids, answers = self.encode_turns(DIALOG)
        except DataError:  # the template rejects this dialog
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
                    f"{self._tokenizer.decode([ids[end]])}, which ends a model's turn\n"
                    "  fix:  move {% endgeneration %} after that token"
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
        used = set(self._source + json.dumps([*messages, tools], ensure_ascii=False, default=str))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
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
                lambda text: self._special.sub(lambda match: match[0][:1] + marks.text + match[0][1:], text),
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
        plain, special, begins, ends = "", [], [], []
        for part in re.split(f"([{''.join(marks)}]|{self._special.pattern})", text):
            if part == marks.begin:
                begins.append(len(plain))
            elif part == marks.end:
                ends.append(len(plain))
            elif part != marks.text:
                if self._special.fullmatch(part):
                    special.append((len(plain), len(plain) + len(part)))
                plain += part
        return Rendered(plain, special, list(zip(begins, ends, strict=True)))

    def _answer(
        self, messages: Sequence[Message], index: int, full: Rendered, render: Render
    ) -> tuple[int, int]:
        """Return the range of message ``index``, from the end of its prompt to the special token after the
        message, or to the start of the next message."""
        if index == 0:
            raise DataError(f"chat template {self.name}: the assistant speaks first\n  fix:  {_MARK_IT}")
        through = render(messages[: index + 1], generation_prompt=False)
        begin = self._prompts.end(messages[:index], [full, through], render)
        if begin is None:
            raise DataError(
                f"chat template {self.name}: message {index + 1} does not start with the generation prompt, "
                f"or the text before it depends on it\n  fix:  {_MARK_IT}"
            )
        alone, here = (
            [(name, place) for name, place in it.named() if place >= begin] for it in (through, full)
        )
        common, ends_dialog = [], False
        for (name, place), (other, at) in zip(alone, here, strict=False):
            text = through.text[begin:place]
            more = full.text[begin:at].removeprefix(text) if full.text.startswith(text, begin) else ""
            ends_dialog = name == other and bool(more.strip())  # the names of other messages come before it
            if name != other or ends_dialog:
                break
            common.append((name, at))
        # What follows the last common token must not be text of the answer, as it is where the token after an
        # answer differs at the end of a dialog.
        rest = alone[len(common) - 1 : len(common) + 1] if common and not ends_dialog else []
        cut = len(rest) == 2 and through.text[rest[0][1] + len(rest[0][0]) : rest[1][1]].strip()
        if common and not cut:  # the remaining tokens end the whole dialog, or belong to the next message
            name, place = common[-1]
            return begin, place + len(name)
        if ends_dialog:
            return begin, alone[0][1]
        if alone or not full.text.startswith(through.text):
            raise DataError(
                f"chat template {self.name}: the end of message {index + 1} cannot be determined\n"
                f"  fix:  {_MARK_IT}"
            )
        return begin, len(through.text)

    def _ids(self, text: str, after: str) -> list[int]:
        """Return the ids of a text, preceded by the special token ``after`` if it is not empty."""
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
    """Return the texts between special tokens, each with the name of the preceding token, if any."""
    text, runs, position, after = rendered.text, [], 0, ""
    for begin, end in rendered.special:
        runs.append((text[position:begin], after))
        position, after = end, text[begin:end]
    return [*runs, (text[position:], after)]


def _tokens_at(offsets: Sequence[tuple[int, int]], place: tuple[int, int]) -> tuple[int, int]:
    """Return the range of tokens that contain characters of ``place``, even partly."""
    begin, end = (bisect_left(offsets, at, key=itemgetter(0)) for at in place)
    # A token may end inside a character, such as a space with the first bytes of an emoji.
    while place[0] < place[1] and begin and offsets[begin - 1][1] > place[0]:
        begin -= 1
    return begin, max(begin, end)


def read_template(path: Path) -> str:
    """Read the template in ``path``.

    Raises:
            DataError: The file does not exist, or is not text.
    """
    try:
        return read_text(path, at_most=_MAX_BYTES)
    except OSError as error:
        raise DataError(f"chat template {str(path)!r}: {error.strerror}") from error


def compiled(name: str, source: str, day: datetime | None = None) -> LimitedTemplate:
    """Compile a template; ``day``, if given, is its current date.

    Raises:
        DataError: It is not a valid template.
    """
    try:
        return LimitedTemplate(source, day)
    except RenderError as error:
        raise DataError(f"chat template {name}, {error}\n  fix:  correct the template") from error


def refuse_unused(
    name: str, used: Collection[str], variables: Mapping[str, Any], mask_empty_thinking: bool = False
) -> None:
    """Check that the template ``name``, which uses the variables ``used``, uses the given variables.

    Raises:
        DataError: It ignores one of them.
    """
    if unused := [variable for variable in variables if variable not in used]:
        raise DataError(
            f"chat template {name} has no variable {unused[0]!r}\n"
            f"  fix:  remove it; the template uses {', '.join(sorted({*used} - {BEGIN, END}))}"
        )
    if mask_empty_thinking and SWITCH not in used:
        raise no_empty_thinking(f"chat template {name}", f"has no variable {SWITCH!r}")


def template_beside(tokenizer: Tokenizer, **options: Any) -> ChatTemplate | None:
    """Return the chat template in the tokenizer's folder, including the tool-use template if there is one;
    None if there is no template.

    The files are chat_template.jinja and additional_chat_templates/tool_use.jinja, else
    tokenizer_config.json.

    Raises:
        DataError: A template cannot be read, or there are several but none is named default.
    """
    folder = tokenizer.folder
    config = folder / "tokenizer_config.json"
    files = {"default": folder / TEMPLATE, "tool_use": folder / TOOL_USE}
    texts = {kind: read_template(file) for kind, file in files.items() if os.path.lexists(file)}
    names = {kind: str(files[kind]) for kind in texts}
    if "default" not in texts:
        templates = read_if_there(config).get("chat_template")
        entries = templates if isinstance(templates, list) else [{"name": "default", "template": templates}]
        for entry in entries:
            kind, text = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
            if isinstance(kind, str) and isinstance(text, str) and kind not in texts:
                texts[kind] = text
                names[kind] = f"{config}" if kind == "default" else f"{config} ({kind})"
    if not texts:
        return None
    if "default" not in texts:
        raise DataError(
            f"{folder} has chat templates named {', '.join(texts)} but none named default\n"
            "  fix:  write the one to use to a file, and set data.chat_template to it (llama-toolkit chat: "
            "--format)"
        )
    tool_use = None
    if "tool_use" in texts:
        tool_use = ChatTemplate(tokenizer, texts["tool_use"], name=names["tool_use"], **options)
    return ChatTemplate(tokenizer, texts["default"], name=names["default"], tool_use=tool_use, **options)


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return bos_token, eos_token and so on from the files next to the tokenizer, else from the tokenizer."""
    by_id = {token: name for name, token in tokenizer.special_tokens.items()}
    known = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: by_id[token] if token is not None else "" for role, token in known.items()}
    for role, token in declared(tokenizer.folder).items():
        name = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(name, str) and name in tokenizer.special_tokens:
            names[role] = name
    return names


_MARK_IT = "put {% generation %} and {% endgeneration %} around the assistant's text in it"


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return the message with its reasoning under the keys that templates use, as in transformers."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to every string in ``value``, except the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _in_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_strings(item, change) for item in value]
    return value
