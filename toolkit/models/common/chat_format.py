"""The interface of every way in which a dialog becomes token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from toolkit.errors import DataError

Message = Mapping[str, Any]
Unwritten = tuple[int | None, str]
"""A key of the message with this index, or of no message (``tools``), of which a format writes nothing."""


class ChatTokenizer(Protocol):
    """The part of a tokenizer that a format uses (:class:`~toolkit.data.tokenizers.tokenizer.Tokenizer`)."""

    path: Path
    kind: Any
    special_tokens: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]: ...

    def encode_after(self, special: int, text: str) -> list[int]: ...


class Turns(NamedTuple):
    """The ``ids`` of a whole dialog, and of each answer in it from which to before which id it is the
    assistant's: its text and the end of its turn."""

    ids: list[int]
    answers: list[tuple[int, int]]


class Rendered(NamedTuple):
    """A dialog as ``text``; ``special`` are the places of the special tokens that a template wrote,
    ``generated`` those of what it marks as the assistant's."""

    text: str
    special: list[tuple[int, int]]
    generated: list[tuple[int, int]]

    def named(self) -> list[tuple[str, int]]:
        """Return the special tokens, each with where it begins."""
        return [(self.text[begin:end], begin) for begin, end in self.special]


def further_keys(message: Message) -> list[str]:
    """The keys of ``message`` that hold something, besides its role and content."""
    return [key for key, held in message.items() if key not in ("role", "content") and held not in _EMPTY]


_EMPTY: tuple[Any, ...] = (None, "", [], {})


class ChatFormat(ABC):
    """How a dialog is laid out for a model.

    Attributes:
        name: what it is called, or the file of a template.
        stop_ids: the tokens at which an answer ends.
        fingerprint: says what the ids depend on besides the tokenizer.
    """

    name: str
    stop_ids: tuple[int, ...]
    fingerprint: str

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        """Say if dialogs are laid out so for the models of ``tokenizer``, as far as its tokens tell."""
        return False

    @abstractmethod
    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        """Ids of the dialog, BOS included where the format has it; ``generation_prompt`` opens the answer
        that is to be generated.

        Raises:
            DataError: messages that the format has no place for.
        """

    @abstractmethod
    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        """Ids of the dialog, which are those of ``encode`` without a generation prompt, with the answers.

        Raises:
            DataError: as ``encode``; answers that cannot be told from the rest.
        """

    def unwritten(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[Unwritten, ...]:
        """Find what a dialog holds and its ids lack: all but roles and contents."""
        keys = ((index, key) for index, message in enumerate(messages) for key in further_keys(message))
        return (*([(None, "tools")] if tools else []), *keys)


def special_ids(tokenizer: ChatTokenizer, names: Sequence[str], wanted_by: str) -> list[int]:
    """Ids of the special tokens ``names``.

    Raises:
        DataError: the tokenizer lacks some of them.
    """
    if missing := [name for name in names if name not in tokenizer.special_tokens]:
        raise DataError(
            f"chat format {wanted_by} needs {', '.join(missing)}, which {tokenizer.path} has not\n"
            "  fix:  name the format of this tokenizer, or the file of a jinja template"
        )
    return [tokenizer.special_tokens[name] for name in names]


def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """(role, content) of each message.

    Raises:
        DataError: no messages, or one whose role or content is no text.
    """
    if not messages:
        raise DataError("a dialog needs at least one message")
    pairs = [(message.get("role"), message.get("content")) for message in messages]
    for index, (role, content) in enumerate(pairs):
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"message {index}: role and content must be text, not {role!r} and {content!r}")
    return pairs  # type: ignore[return-value]  # both have been looked at


def exchanges(messages: Sequence[Message], model: str) -> tuple[str | None, list[str], list[str]]:
    """The system message, if there is one, the questions, and the answers, of which the last may lack.

    Raises:
        DataError: other roles, or in another order, than those that ``model`` takes.
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
            f"message roles {', '.join(roles) or 'system alone'}: {model} takes user and assistant in "
            f"turns, after at most one system message"
        )
    return system, [content for _, content in rest[::2]], [content for _, content in rest[1::2]]
