"""Conversations as token ids, with the weight in the loss of each (supervised fine-tuning).

By ``train_on`` the assistant's texts with the ends of its turns are learnt, those of its last turn alone, or
all. A token's weight is that of its row times that of its message, and 0 where it is not learnt. The first
token of a conversation is never learnt: nothing predicts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toolkit.data.chat.empty_masks import NO_LOSS
from toolkit.data.chat.formats import chat_format
from toolkit.data.chat.shapes import Conversation, Shape
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.chat.unwritten import ARGUMENTS
from toolkit.data.text_files import Piece
from toolkit.data.token_files import WEIGHTS
from toolkit.data.tokenize import Encoded
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat, Message, Turns

VERSION = 5  # raise it when conversations become other ids or weights


@dataclass(frozen=True)
class ChatOptions:
    """Options of the configuration for conversations, of all corpora."""

    template: str | None = None
    variables: Mapping[str, bool | str] = field(default_factory=dict)
    train_on: str = "assistant"
    mask_empty_thinking: bool = False

    def format_for(self, tokenizer: Tokenizer) -> ChatFormat:
        """The chat format of ``tokenizer``'s model, or that of the configuration."""
        return chat_format(
            tokenizer,
            self.template,
            variables=self.variables,
            training=True,
            mask_empty_thinking=self.mask_empty_thinking,
        )


@dataclass(frozen=True)
class ConversationEncoder:
    """Turns pieces into tokens and weights, in any process: the template is compiled where it is first
    needed."""

    tokenizer: Tokenizer
    shape: Shape
    options: ChatOptions
    dtype: str
    files: tuple[Path, ...] = ()
    EXTRA: ClassVar[tuple[str, ...]] = ("mask.bin", "conversations.bin")

    @cached_property
    def form(self) -> ChatFormat:
        return self.options.format_for(self.tokenizer)

    def __reduce__(self) -> tuple:
        return ConversationEncoder, (self.tokenizer, self.shape, self.options, self.dtype, self.files)

    @cached_property
    def remarks(self) -> Counter[str]:
        """Remarks for the user on encoded conversations, with the number of conversations."""
        return Counter()

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset({*self.form.stop_ids, *self.tokenizer.special_tokens.values()})

    @property
    def fingerprint(self) -> list[Any]:
        """Everything that ids and weights depend on besides the text and the tokenizer."""
        shape = [self.shape.format, sorted(self.shape.names.items())]
        special = sorted(self.tokenizer.special_tokens.items())  # of some tokenizers in a file of their own
        options = [self.options.train_on, self.options.mask_empty_thinking]
        return [VERSION, *shape, self.form.fingerprint, *options, special]

    def __call__(self, piece: Piece) -> Encoded:
        tokens, weights, about = [], [], []
        self.remarks.clear()
        file = self.files.index(piece.path)
        for place, row in piece.rows():
            where = f"{piece.path}, {piece.unit} {place}"
            for conversation in self.shape.conversations(row, where):
                ids, weights_of_ids = self.encode(conversation, where)
                learnt = np.flatnonzero(weights_of_ids)
                tokens.append(ids)
                weights.append(weights_of_ids)
                about.append((file, place, learnt[0] if len(learnt) else NO_LOSS, len(learnt)))
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        of_tokens = np.concatenate([np.zeros(0, np.float32), *weights])
        mask = of_tokens != 0
        extra = {
            self.EXTRA[0]: mask.astype(np.uint8),
            self.EXTRA[1]: np.array(about, np.int64).reshape(-1, 4),
        }
        if (of_tokens[mask] != 1).any():
            extra[WEIGHTS] = np.where(mask, of_tokens, np.float32(1))
        joined = np.concatenate([np.zeros(0, self.dtype), *tokens])
        return Encoded(joined, lengths, True, True, piece.n_file_bytes, extra, dict(self.remarks))

    def encode(self, conversation: Conversation, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (``dtype``) and weights (fp32) of a conversation, on which it may add ``remarks``.

        Raises:
            DataError: the format has no place for it, or for a part that matters; ``where`` is told.
        """
        try:
            turns = self._turns(conversation)
            if not turns.ids:
                raise DataError(f"chat format {self.form.name} makes nothing of it")
            weights = token_weights(conversation, turns.answers, len(turns.ids), self.options.train_on)
        except DataError as error:
            rule, _, rest = str(error).partition("\n  fix:  ")
            fix = rest or "correct it, or set data.chat_template to a template that has a place for it"
            raise DataError(f"{where}: {rule}\n  fix:  {fix}") from None
        return np.array(turns.ids, self.dtype), weights

    def _turns(self, conversation: Conversation) -> Turns:
        messages, tools = conversation.messages, conversation.tools
        remarks = {self._remark(messages, index, key) for index, key in self.form.unwritten(messages, tools)}
        if tools and isinstance(self.form, ChatTemplate):
            turns = self.form.encode_turns(messages, tools)
        else:
            turns = self.form.encode_turns(messages)
        if turns.answers and not any(self._ends_turn(turns.ids[begin:end]) for begin, end in turns.answers):
            remarks.add(_NO_END)
        self.remarks.update(remarks)
        return turns

    def _ends_turn(self, ids: Sequence[int]) -> bool:
        """Say if an answer ends with a special token, perhaps before white space."""
        last = next((at for at in reversed(range(len(ids))) if ids[at] in self._ends), None)
        return last is not None and not self.tokenizer.decode(ids[last + 1 :]).strip()

    def _remark(self, messages: Sequence[Message], index: int | None, key: str) -> str:
        """Remark for the user on a key that the format does not write.

        Raises:
            DataError: an answer, a tool or a text would be missing.
        """
        if index is None:
            raise DataError(
                f"it has {key}, of which the chat format {self.form.name} writes nothing\n"
                "  fix:  set data.chat_template to a template that does, leave it unset and put a template "
                "named tool_use beside the tokenizer, or leave the column out"
            )
        role = messages[index]["role"]
        if key in ("tool_calls", ARGUMENTS) or (key == "content" and role != "assistant"):
            as_object = ", give them as an object" if key == ARGUMENTS else ""
            raise DataError(
                f"message {index + 1} ({role}) has {key}, of which the chat format {self.form.name} writes "
                f"nothing\n  fix:  set data.chat_template to a template that does{as_object}, or remove the "
                "message"
            )
        beside = " beside tool_calls" if key == "content" else ""
        return f"the chat format writes nothing of {key!r}{beside}"


_NO_END = (
    "no answer ends with a special token, so that nothing to stop at is learnt: put {{ eos_token }} behind "
    "each answer in the chat template"
)


def token_weights(
    conversation: Conversation, answers: list[tuple[int, int]], n_ids: int, train_on: str
) -> np.ndarray:
    """fp32 (n_ids,): the weight of each token, 0 where it is not learnt. ``answers`` are the assistant's
    tokens, a pair for each turn.

    Raises:
        DataError: the template marks more or fewer parts than there are turns, where single turns are meant;
            or a message that is learnt and not the assistant's has a weight.
    """
    indices = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    of_turns = [conversation.weights.get(index, 1.0) for index in indices]
    in_prompt = [index < conversation.first for index in indices]
    if train_on == "all" and (others := conversation.weights.keys() - indices):
        number = min(others)
        raise DataError(
            f"message {number + 1} has weight {conversation.weights[number]:g} and is the "
            f'{conversation.messages[number]["role"]}\'s: with data.train_on = "all" only turns of the '
            'assistant can have another than 1\n  fix:  remove it, or set data.train_on = "assistant"'
        )
    single = any(weight != 1 for weight in of_turns) or any(in_prompt) or train_on == "last_assistant"
    if single and len(indices) != len(answers):
        raise DataError(
            f"the template marks {len(answers)} parts for {len(indices)} turns of the assistant, so that "
            "single turns cannot be told\n  fix:  put {% generation %} around each turn once, or set "
            'data.train_on = "assistant" and no weights'
        )
    weights = np.full(n_ids, conversation.weight * (train_on == "all"), np.float32)
    for number, (begin, end) in enumerate(answers):
        learnt = True
        if train_on != "all":
            learnt = not (single and in_prompt[number])
            learnt &= train_on == "assistant" or number == len(answers) - 1
        weights[begin:end] = conversation.weight * (of_turns[number] if single else 1) * learnt
    weights[0] = 0
    return weights
