"""Dataset formats of conversations, converted to a list of messages with ``role`` and ``content``.

    messages           {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}         OpenAI's
    sharegpt           {"conversations": [{"from": "human", "value": "…"}, …], "system": "…"}
    alpaca             {"instruction": "…", "input": "…", "output": "…", "system": "…"}
    prompt_completion  {"prompt": "…", "completion": "…"}, either of them a text or a list of messages
    preference         {"prompt": "…", "chosen": "…", "rejected": "…"}, two conversations; answers that are
                       lists, without a list as a prompt, are whole conversations, as in trl; for reward
                       models optionally with a "margin"
    unpaired_preference  {"prompt": "…", "completion": "…", "label": true}, as prompt_completion

All but the last two may have a ``weight``, and all may have ``tools``. ``system``, ``input``, ``tools`` and
``weight`` may be absent or empty. Columns and message keys can be renamed (``data.columns``). Null keys count
as absent, in messages and in ``tools`` that are not text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NamedTuple

from toolkit.data.corpus import PREFERENCE, UNPAIRED
from toolkit.data.file_kinds import SourceError
from toolkit.data.text_files import check_text
from toolkit.errors import DataError, Problem, did_you_mean, first_few, quote
from toolkit.io.json_fields import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bot": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_NAMES = {
    "messages": ("messages", "tools", "weight", "role", "content"),
    "sharegpt": ("conversations", "system", "tools", "weight", "from", "value"),
    "alpaca": ("instruction", "input", "output", "system", "tools", "weight"),
    "prompt_completion": ("prompt", "completion", "tools", "weight", "role", "content"),
    "preference": ("prompt", "chosen", "rejected", "margin", "tools", "role", "content"),
    "unpaired_preference": ("prompt", "completion", "label", "tools", "role", "content"),
}
FORMATS = tuple(name for name in _NAMES if name not in (PREFERENCE, UNPAIRED))
"""Formats with one conversation per row."""
_OPTIONAL = ("input", "system", "tools", "weight")
_SHOWN = 20
_MAX_DEPTH = 100
_OF_MESSAGES = ("role", "content", "from", "value")
_LEAST, _MOST = 1e-9, 1e9
"""Range of a nonzero weight, such that the product of two weights is a normal number in fp32."""


class Conversation(NamedTuple):
    """Messages with role and content. ``weights`` are the loss weights of messages, if not 1, to be
    multiplied by the row's ``weight``. The assistant's messages before message ``first`` belong to a prompt
    and are not in the loss. ``tools`` are the callable tools. ``desirable`` is the label of an answer, and
    ``margin`` the margin by which the chosen answer of a pair is better."""

    messages: list[dict[str, Any]]
    weights: Mapping[int, float] = {}
    first: int = 0
    tools: list[Any] | None = None
    weight: float = 1.0
    desirable: bool = True
    margin: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A format, with the names of columns and keys in a corpus. Pairs can have more ``data``: "labels", where
    each answer is a separate conversation, or "margins"."""

    format: str
    renamed: tuple[tuple[str, str], ...] = ()
    data: Literal["", "labels", "margins"] = ""

    @cached_property
    def names(self) -> dict[str, str]:
        # Preferences do not support weights; the column is read in order to reject them.
        return {name: name for name in (*_NAMES[self.format], "weight")} | self._chosen

    @property
    def _chosen(self) -> dict[str, str]:
        return {name: other for name, other in self.renamed if name in _NAMES[self.format]}

    @property
    def paired(self) -> bool:
        """True if a row contains two conversations, with a chosen and a rejected answer."""
        return self.format == PREFERENCE

    @property
    def labeled(self) -> bool:
        """True if each conversation is desirable or not, instead of preferred to another."""
        return self.data == "labels" or self.format == UNPAIRED

    @property
    def _optional(self) -> tuple[str, ...]:
        return ("prompt", "tools", "weight", "margin") if self.paired else _OPTIONAL

    def columns(self, names: Collection[str], where: str) -> list[str]:
        """Return the columns to read, among ``names``.

        Raises:
            SourceError: A column is missing; the message contains ``where`` and the existing columns.
        """
        wanted = {name: column for name, column in self.names.items() if name not in _OF_MESSAGES}
        chosen = self._chosen
        missing = [
            name
            for name, column in wanted.items()
            if column not in names and (name not in self._optional or name in chosen)
        ]
        if missing:
            present = first_few(list(map(repr, names)), _SHOWN) or "none"
            column, example = wanted[missing[0]], next(iter(names), "name")
            rule = f"{where} has no column {column!r}, which format {self.format} needs; it has {present}"
            fix = f'set data.columns, such as {{{missing[0]} = "{example}"}}, or another data.format'
            raise SourceError(Problem(rule, fix, "columns", chosen))
        return [column for column in wanted.values() if column in names]

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise DataError if a row does not have this shape."""
        self.columns(row, where)
        self.conversations(row, where)

    def conversations(self, row: Mapping[str, Any], where: str) -> list[Conversation]:
        """Return the conversation in a row, or the two of a pair, the chosen one first.

        Raises:
            DataError: The row has another shape, an unknown role, an empty turn or an invalid weight. The
                message contains ``where`` and the fix.
        """
        try:
            self.columns(row, where)
        except SourceError as error:
            problem = error.problems[0]
            raise DataError(f"{problem.rule}\n  fix:  {problem.fix}") from None
        conversations = (
            self._preference(row, where) if self.paired else [_READERS[self.format](self, row, where)]
        )
        tools = self._tools(row, where)
        conversations = [conversation._replace(tools=tools) for conversation in conversations]
        if self.labeled:
            labels = (True, False) if self.paired else (self._label(row, where),)
            conversations = [
                one._replace(desirable=label) for one, label in zip(conversations, labels, strict=True)
            ]
        if self.data == "margins":
            conversations = [one._replace(margin=self._margin(row, where)) for one in conversations]
        names = (", chosen", ", rejected") if self.paired else ("",)
        for conversation, name in zip(conversations, names, strict=True):
            if not conversation.messages:
                raise DataError(f"{where}{name}: the conversation has no message\n  fix:  remove it")
            for number, message in enumerate(conversation.messages):
                _check(message, f"{where}{name}, message {number + 1}")
        weight = _weight(self._value(row, "weight"), where)
        others = {weight, *(other for one in conversations for other in one.weights.values() if other)} - {
            1.0
        }
        if (self.paired or self.labeled) and others:
            fix = "remove it; a message can only have 0, which leaves it out, or 1"
            raise DataError(
                f"{where}: weight {min(others):g}, but preferences have no weights\n  fix:  {fix}"
            )
        return [conversation._replace(weight=weight) for conversation in conversations]

    def conversation(self, row: Mapping[str, Any], where: str) -> Conversation:
        """Return the only conversation in a row. Raises DataError as in :meth:`conversations`."""
        [conversation] = self.conversations(row, where)
        return conversation

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        return row.get(self.names[name])

    def _label(self, row: Mapping[str, Any], where: str) -> bool:
        value = self._value(row, "label")
        if not isinstance(value, bool):
            fix = "write true for a desirable answer, false for an undesirable one"
            raise DataError(f"{where}: column {self.names['label']!r} contains {quote(value)}\n  fix:  {fix}")
        return value

    def _margin(self, row: Mapping[str, Any], where: str) -> float:
        value = self._value(row, "margin")
        number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
        if value is not None and not (number and abs(value) <= _MOST):
            fix = f"write a number of at most {_MOST:g}, by which the chosen answer's score should be higher"
            raise DataError(
                f"{where}: column {self.names['margin']!r} contains {quote(value)}\n  fix:  {fix}"
            )
        return float(value or 0)

    def _text(self, row: Mapping[str, Any], name: str, where: str) -> str:
        value = self._value(row, name)
        check_text(value, f"{where}: column {self.names[name]!r}")
        return value or ""

    def _messages(self, value: Any, name: str, where: str) -> Conversation:
        """Convert a list of messages, with weights."""
        role, content = ("from", "value") if self.format == "sharegpt" else ("role", "content")
        own = {"content": self.names[content], "role": self.names[role]}
        keys = {key: name for name, key in own.items()}
        roles = _SHAREGPT_ROLES if self.format == "sharegpt" else {name: name for name in ROLES}
        if not isinstance(value, list):
            raise DataError(
                f"{where}: column {self.names[name]!r} contains {_kind(value)}\n  fix:  it must be a list "
                f'of messages, each an object such as {{"{self.names[role]}": …, "{self.names[content]}": …}}'
            )
        messages, weights = [], {}
        for number, item in enumerate(value):
            at = f"{where}, message {number + 1}"
            if not isinstance(item, Mapping):
                raise DataError(f"{at}: it is {_kind(item)}\n  fix:  each message must be an object")
            if self.names[role] not in item:
                present = first_few(list(map(repr, item)), _SHOWN) or "none"
                raise DataError(
                    f"{at} has no key {self.names[role]!r}; it has {present}\n  fix:  set the role's key "
                    f'in data.columns, such as {{{role} = "{next(iter(item), "name")}"}}'
                )
            given_role = item[self.names[role]]
            if not isinstance(given_role, str) or given_role not in roles:
                fix = did_you_mean(str(given_role), roles, f"roles are {', '.join(roles)}")
                shown = "null" if given_role is None else quote(given_role)
                raise DataError(f"{at}: {self.names[role]} {shown}\n  fix:  {fix}")
            values = _plain(item, at)
            message = {keys.get(key, key): values[key] for key in values if key in keys or key not in own}
            message["role"] = roles[given_role]
            if (weight := _weight(message.pop("weight", None), at)) != 1:
                weights[number] = weight
            messages.append(message)
        return Conversation(messages, weights)

    def _openai(self, row: Mapping[str, Any], where: str) -> Conversation:
        return self._messages(self._value(row, "messages"), "messages", where)

    def _tools(self, row: Mapping[str, Any], where: str) -> list[Any] | None:
        value = self._value(row, "tools") or None
        as_text = isinstance(value, str)
        if isinstance(value, str):
            with suppress(ValueError):
                value = parse_json(value)
        if value is not None and not _are_objects(value):
            raise DataError(
                f"{where}: column {self.names['tools']!r} contains {_kind(value)}\n  fix:  it must be a list "
                "of functions, each an object, or the JSON of such a list"
            )
        return _plain(value, f"{where}: column {self.names['tools']!r}", as_text) or None

    def _sharegpt(self, row: Mapping[str, Any], where: str) -> Conversation:
        found = self._messages(self._value(row, "conversations"), "conversations", where)
        system = self._text(row, "system", where)
        if not system:
            return found
        moved = {number + 1: weight for number, weight in found.weights.items()}
        return Conversation([{"role": "system", "content": system}, *found.messages], moved)

    def _alpaca(self, row: Mapping[str, Any], where: str) -> Conversation:
        asked = [self._text(row, name, where) for name in ("instruction", "input")]
        texts = {
            "system": self._text(row, "system", where),
            "user": "\n\n".join(text for text in asked if text),
            "assistant": self._text(row, "output", where),
        }
        return Conversation(
            [{"role": role, "content": text} for role, text in texts.items() if text or role != "system"]
        )

    def _prompt_completion(self, row: Mapping[str, Any], where: str) -> Conversation:
        return self._answered(row, "completion", where)

    def _preference(self, row: Mapping[str, Any], where: str) -> list[Conversation]:
        answers = ("chosen", "rejected")
        of_messages = [isinstance(self._value(row, name), list) for name in answers]
        if of_messages[0] != of_messages[1]:
            fix = "both must be texts, or lists of messages"
            raise DataError(f"{where}: one of chosen and rejected is a list, the other is not\n  fix:  {fix}")
        prompt = self._value(row, "prompt")
        if not of_messages[0] and prompt is None:
            fix = "name its column in data.columns, or make chosen and rejected lists of all messages"
            raise DataError(f"{where}: there is no prompt\n  fix:  {fix}")
        if isinstance(prompt, list) or not of_messages[0]:
            return [self._answered(row, name, where) for name in answers]
        whole = [self._messages(self._value(row, name), name, where) for name in answers]
        pairs = list(zip(*(conversation.messages for conversation in whole), strict=False))
        first = next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
        return [conversation._replace(first=max(0, first)) for conversation in whole]

    def _answered(self, row: Mapping[str, Any], answer: str, where: str) -> Conversation:
        """Convert a prompt and its answer, each a text or messages."""
        parts = []
        for name, role in (("prompt", "user"), (answer, "assistant")):
            value = self._value(row, name)
            if isinstance(value, list):
                parts.append(self._messages(value, name, where))
            else:
                parts.append(Conversation([{"role": role, "content": self._text(row, name, where)}]))
        prompt, completion = parts
        first = len(prompt.messages)
        moved = {first + number: weight for number, weight in completion.weights.items()}
        messages, weights = [*prompt.messages, *completion.messages], {**prompt.weights, **moved}
        return Conversation(messages, weights, first)


_READERS = {
    "messages": Shape._openai,
    "sharegpt": Shape._sharegpt,
    "alpaca": Shape._alpaca,
    "prompt_completion": Shape._prompt_completion,
    "unpaired_preference": Shape._prompt_completion,
}


def unknown_names(format: str, names: Collection[str]) -> str | None:
    """Describe the first of ``names`` that the format lacks; return None if it has all."""
    own = _NAMES[format]
    wrong = next((name for name in names if name not in own), None)
    return wrong and f"{format} has no {wrong!r}: its names are {', '.join(own)}"


def _check(message: dict[str, Any], where: str) -> None:
    """Check that a message has text or tool calls; join text that is split into parts."""
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if calls and not _are_objects(calls):
        fix = "tool_calls must be a list of calls, each an object"
        raise DataError(f"{where} ({role}) has tool_calls that are {_kind(calls)}\n  fix:  {fix}")
    if isinstance(content, list):
        content = message["content"] = "".join(_part(part, where) for part in content)
    if content is None and calls:
        return
    if not isinstance(content, str):
        problem = "no content" if content is None else f"content that is {_kind(content)}"
        raise DataError(f"{where} ({role}) has {problem}\n  fix:  content must be text")
    if role in ("user", "assistant") and not content.strip() and not calls:
        raise DataError(
            f"{where}: the {role}'s turn is empty\n  fix:  remove the conversation, or write the turn"
        )


def _weight(value: Any, where: str) -> float:
    """Return the weight of a row or a message; the default is 1. Raises DataError for an invalid weight."""
    if value is None:
        return 1.0
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not (number and (value == 0 or _LEAST <= value <= _MOST)):
        rule = f"weight {quote(value)} is neither 0 nor a number from {_LEAST:g} to {_MOST:g}"
        raise DataError(f"{where}: {rule}\n  fix:  0 leaves it out of the loss, another multiplies its loss")
    return float(value)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise DataError(
        f"{where}: a part of the content is {quote(kind or _kind(part))}\n"
        "  fix:  only text can be trained on: remove it"
    )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _plain(value: Any, where: str, keep_nulls: bool = False, depth: int = 0) -> Any:
    """Copy a JSON value, dropping null keys unless ``keep_nulls``; items of lists are kept.

    Arrow gives each object the keys of the same object in all other rows, as null, and JSON lines exported
    from Arrow contain them too. These nulls cannot be distinguished from those in the original data.

    Raises:
        DataError: A text or key is not UTF-8, or the nesting is too deep.
    """
    if isinstance(value, str):
        check_text(value, where)
        return value
    if depth > _MAX_DEPTH:
        raise DataError(f"{where}: it is nested more than {_MAX_DEPTH} deep\n  fix:  remove it")
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items() if keep_nulls or item is not None}
        return {_plain(key, where): _plain(item, where, keep_nulls, depth + 1) for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, keep_nulls, depth + 1) for item in value]
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    numbers = dict.fromkeys((int, float), "a number")
    return (names | numbers).get(type(value), f"of type {type(value).__name__}")
