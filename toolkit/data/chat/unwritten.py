"""Detect parts of a conversation that a chat template ignores, by rendering it with and without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import DataError
from toolkit.models.common.chat_format import Message, Unwritten, further_keys

ARGUMENTS = "arguments of tool_calls"
"""Name reported for a tool call whose arguments are ignored."""
_MAX_KNOWN = 10_000


class UnwrittenKeys:
    """Detects ignored parts once per structure of a conversation (roles, keys, number of calls), because
    templates depend only on the structure, and a corpus has few."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[Unwritten, ...]] = {}

    def find(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        render: Callable[[Sequence[Message], Sequence[Any] | None], str],
    ) -> tuple[Unwritten, ...]:
        """Return the keys whose removal does not change the conversation's text.

        Conversations of only user and assistant texts are not rendered.
        """
        lacking = list(_lacking(messages, tools))
        if not lacking:
            return ()
        structure = (
            bool(tools),
            *(
                (
                    message["role"],
                    bool((message.get("content") or "").strip()),
                    *further_keys(message),
                    *(type(_arguments(call)) for call in _calls(message)),
                )
                for message in messages
            ),
        )
        if structure not in self._known:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            text = render(messages, tools)
            ignored = (key for key, less, fewer in lacking if _renders(text, render, less, fewer))
            self._known[structure] = tuple(dict.fromkeys(ignored))
        return self._known[structure]


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _arguments(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call, or None."""
    function = call.get("function")
    return (function if isinstance(function, Mapping) else call).get("arguments") or None


def _without_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _without_arguments(function)}
    return {**call, "arguments": type(call["arguments"])()}


def _renders(
    text: str, render: Callable[..., str], messages: Sequence[Message], tools: Sequence[Any] | None
) -> bool:
    try:
        return render(messages, tools) == text
    except DataError:  # the template requires the removed part
        return False


def _lacking(
    messages: Sequence[Message], tools: Sequence[Any] | None
) -> Iterator[tuple[Unwritten, Sequence[Message], Sequence[Any] | None]]:
    """Yield parts that may be ignored, each with the conversation without that part.

    Every template writes the texts of users, and of assistants without tool calls.
    """
    if tools:
        yield (None, "tools"), messages, None
    for index, message in enumerate(messages):
        calls = _calls(message)
        variants: list[tuple[str, Message]] = []
        if (message.get("content") or "").strip() and (
            "tool_calls" in message or message["role"] not in ("user", "assistant")
        ):
            variants.append(("content", {**message, "content": ""}))
        for key in further_keys(message):
            less: Message = {name: value for name, value in message.items() if name != key}
            if key == "tool_calls" and len(calls) > 1:
                fewer = [calls[:at] + calls[at + 1 :] for at in range(len(calls))]
                variants += [(key, {**less, key: some}) for some in fewer]
            else:
                variants.append((key, less))
        for at, call in enumerate(calls):
            if _arguments(call):
                bare = [*calls[:at], _without_arguments(call), *calls[at + 1 :]]
                variants.append((ARGUMENTS, {**message, "tool_calls": bare}))
        for key, lesser in variants:
            yield (index, key), [*messages[:index], lesser, *messages[index + 1 :]], tools
