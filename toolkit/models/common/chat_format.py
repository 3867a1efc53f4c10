"""The interface of chat formats, which convert a dialog to token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from toolkit.errors import DataError

Message = Mapping[str, Any]
Unwritten = tuple[int | None, str]
"""A key of the message with this index, or of the dialog (``tools``), that a format omits."""


class ChatTokenizer(Protocol):
    """The tokenizer methods that a format uses (:class:`~toolkit.data.tokenizers.tokenizer.Tokenizer`)."""

    path: Path
    kind: Any
    special_tokens: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]: ...

    def encode_after(self, special: int, text: str) -> list[int]: ...


class Turns(NamedTuple):
    """The ``ids`` of a dialog, and the range of ids of each answer, including the end of its turn."""

    ids: list[int]
    answers: list[tuple[int, int]]


class Rendered(NamedTuple):
    """A dialog as ``text``, with the ranges of ``special`` tokens written by the template and of text that it
    marks as ``generated`` by the assistant."""

    text: str
    special: list[tuple[int, int]]
    generated: list[tuple[int, int]]

    def named(self) -> list[tuple[str, int]]:
        """Return the special tokens and their start positions."""
        return [(self.text[begin:end], begin) for begin, end in self.special]


def further_keys(message: Message) -> list[str]:
    """Return the non-empty keys of ``message`` other than role and content."""
    return [key for key, value in message.items() if key not in ("role", "content") and value not in _EMPTY]


_EMPTY: tuple[Any, ...] = (None, "", [], {})


class ChatFormat(ABC):
    """The format of dialogs that a model expects.

    Attributes:
        name: Name of the format, or the path of a template file.
        stop_ids: Tokens that end an answer.
        fingerprint: Identifies everything besides the tokenizer that determines the ids.
    """

    name: str
    stop_ids: tuple[int, ...]
    fingerprint: str

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        """Return whether ``tokenizer`` has this format's special tokens."""
        return False

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        """Return the ids of the dialog, with BOS if the format uses it.

        ``generation_prompt`` appends the header of the answer to generate, if the format has one.

        Raises:
                DataError: The format does not support a message.
        """
        return self.encode_turns(messages).ids

    @abstractmethod
    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        """Return the ids of the dialog, as ``encode`` does without a generation prompt, and its answers.

        Raises:
            DataError: As in ``encode``, or answers cannot be located.
        """

    def unwritten(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Unwritten, ...]:
        """Return the parts of the dialog that its ids do not represent: everything except roles and
        contents."""
        keys = ((index, key) for index, message in enumerate(messages) for key in further_keys(message))
        return (*([(None, "tools")] if tools else []), *keys)


def special_ids(tokenizer: ChatTokenizer, names: Sequence[str], wanted_by: str) -> list[int]:
    """Return the ids of the special tokens ``names``.

    Raises:
        DataError: The tokenizer lacks some of them.
    """
    if missing := [name for name in names if name not in tokenizer.special_tokens]:
        raise DataError(
            f"chat format {wanted_by} needs {', '.join(missing)}, which {tokenizer.path} does not have\n"
            "  fix:  use the format of this tokenizer, or a file with a jinja template"
        )
    return [tokenizer.special_tokens[name] for name in names]


def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return (role, content) of each message.

    Raises:
        DataError: There are no messages, or a role or content is not text.
    """
    if not messages:
        raise DataError("a dialog needs at least one message")
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    for index, (role, content) in enumerate(pairs):
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"message {index}: role and content must be text, not {role!r} and {content!r}")
    return pairs  # type: ignore[return-value]  # both have been checked


def exchanges(messages: Sequence[Message], model: str) -> tuple[str | None, list[str], list[str]]:
    """Return the system message or None, the questions, and the answers; the last answer may be missing.

    Raises:
        DataError: ``model`` does not support these roles or their order.
    """
    system = None
    (role, content), *rest = texts(messages)
    if role == "system":
        system = content
    else:
        rest = [(role, content), *rest]
    roles = [role for role, _ in rest]
    if not rest or roles != [("user", "assistant")[index % 2] for index in range(len(rest))]:
        raise DataError(
            f"message roles {', '.join(roles) or 'system alone'}: {model} needs user and assistant in "
            f"turns, after at most one system message"
        )
    return system, [content for _, content in rest[::2]], [content for _, content in rest[1::2]]
