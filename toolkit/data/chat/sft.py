"""Supervised fine-tuning: conversations as token ids with loss weights.

Depending on ``train_on``, the loss covers the assistant's texts including the ends of turns, only those of
the last turn, or all tokens. A token's weight is its row's weight times its message's weight, and 0 outside
the loss. The first token of a conversation is never in the loss: nothing predicts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.chat.choose_format import chat_format
from toolkit.data.chat.empty_masks import NO_LOSS
from toolkit.data.chat.shapes import Conversation, Shape
from toolkit.data.chat.template import ChatTemplate
from toolkit.data.chat.unwritten import ARGUMENTS
from toolkit.data.text_files import Chunk
from toolkit.data.token_files import LABELS, MARGINS, WEIGHTS
from toolkit.data.tokenize import Encoded
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat, Message, Turns

VERSION = 5  # increment when the ids or weights of conversations change


@dataclass(frozen=True)
class ChatOptions:
    """Conversation options of the configuration, which apply to all corpora."""

    template: str | None = None
    variables: Mapping[str, bool | str] = field(default_factory=dict)
    train_on: str = "assistant"
    mask_empty_thinking: bool = False

    def format_for(self, tokenizer: Tokenizer) -> ChatFormat:
        """Return the configured chat format, or the format of ``tokenizer``'s model."""
        return chat_format(
            tokenizer,
            self.template,
            variables=self.variables,
            training=True,
            mask_empty_thinking=self.mask_empty_thinking,
        )


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes chunks as tokens and weights, in any process; the template is compiled on first use."""

    tokenizer: Tokenizer
    shape: Shape
    options: ChatOptions
    dtype: str
    files: tuple[Path, ...] = ()

    @property
    def EXTRA(self) -> tuple[str, ...]:
        margins = [MARGINS] * (self.shape.data == "margins")
        return ("mask.bin", "conversations.bin", *margins, *[LABELS] * self.shape.labeled)

    @cached_property
    def form(self) -> ChatFormat:
        return self.options.format_for(self.tokenizer)

    def __reduce__(self) -> tuple:
        return ConversationEncoder, (self.tokenizer, self.shape, self.options, self.dtype, self.files)

    @cached_property
    def remarks(self) -> Counter[str]:
        """Notes for the user about encoded conversations, each with the number of conversations."""
        return Counter()

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset({*self.form.stop_ids, *self.tokenizer.special_tokens.values()})

    @property
    def fingerprint(self) -> list[Any]:
        """Everything that determines ids and weights, except text and tokenizer."""
        shape = [self.shape.format, sorted(self.shape.names.items())]
        special = sorted(self.tokenizer.special_tokens.items())  # some tokenizers store them in another file
        options = [self.options.train_on, self.options.mask_empty_thinking]
        data = [self.shape.data] if self.shape.data else []
        return [VERSION, *shape, self.form.fingerprint, *options, special, *data]

    def __call__(self, chunk: Chunk) -> Encoded:
        tokens, weights, about, extras = [], [], [], []
        self.remarks.clear()
        file = self.files.index(chunk.path)
        for number, row in chunk.rows():
            where = f"{chunk.path}, {chunk.unit} {number}"
            for conversation in self.shape.conversations(row, where):
                ids, weights_of_ids = self.encode(conversation, where)
                in_loss = np.flatnonzero(weights_of_ids)
                tokens.append(ids)
                weights.append(weights_of_ids)
                extras.append(conversation.desirable if self.shape.labeled else conversation.margin)
                about.append((file, number, in_loss[0] if len(in_loss) else NO_LOSS, len(in_loss)))
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        of_tokens = np.concatenate([np.zeros(0, np.float32), *weights])
        mask = of_tokens != 0
        about_each = np.array(about, np.int64).reshape(-1, 4)
        last = np.array(extras, np.int32 if self.shape.labeled else np.float32)
        extra = dict(zip(self.EXTRA, (mask.astype(np.uint8), about_each, last), strict=False))
        if (of_tokens[mask] != 1).any():
            extra[WEIGHTS] = np.where(mask, of_tokens, np.float32(1))
        joined = np.concatenate([np.zeros(0, self.dtype), *tokens])
        return Encoded(joined, lengths, True, True, chunk.n_file_bytes, extra, dict(self.remarks))

    def encode(self, conversation: Conversation, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (``dtype``) and weights (fp32) of a conversation, and update ``remarks``.

        Raises:
            DataError: The format does not support the conversation, or an essential part of it; the message
                contains ``where``.
        """
        try:
            turns = self._turns(conversation)
            if not turns.ids:
                raise DataError(f"chat format {self.form.name} writes no text for it")
            weights = token_weights(conversation, turns.answers, len(turns.ids), self.options.train_on)
        except DataError as error:
            rule, _, rest = str(error).partition("\n  fix:  ")
            fix = rest or "correct it, or set data.chat_template to a template that supports it"
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
        """Return whether an answer ends with a special token, ignoring trailing whitespace."""
        last = next((at for at in reversed(range(len(ids))) if ids[at] in self._ends), None)
        return last is not None and not self.tokenizer.decode(ids[last + 1 :]).strip()

    def _remark(self, messages: Sequence[Message], index: int | None, key: str) -> str:
        """Return a note for the user about a key that the format ignores.

        Raises:
            DataError: The key is essential: an answer, a tool or a text.
        """
        if index is None:
            raise DataError(
                f"it has {key}, which the chat format {self.form.name} ignores\n"
                "  fix:  set data.chat_template to a template that supports it, unset it and put a template "
                "named tool_use next to the tokenizer, or remove the column"
            )
        role = messages[index]["role"]
        if key in ("tool_calls", ARGUMENTS) or (key == "content" and role != "assistant"):
            as_object = ", give them as an object" if key == ARGUMENTS else ""
            raise DataError(
                f"message {index + 1} ({role}) has {key}, which the chat format {self.form.name} ignores\n"
                f"  fix:  set data.chat_template to a template that supports it{as_object}, or remove the "
                "message"
            )
        context = " next to tool_calls" if key == "content" else ""
        return f"the chat format ignores {key!r}{context}"


_NO_END = (
    "no answer ends with a special token, so the model will not learn when to stop: put {{ eos_token }} "
    "after each answer in the chat template"
)


def token_weights(
    conversation: Conversation, answers: list[tuple[int, int]], n_ids: int, train_on: str
) -> np.ndarray:
    """Return the weight of each token, fp32 (n_ids,), 0 outside the loss. ``answers`` are the assistant's
    token ranges, one per turn.

    Raises:
        DataError: Single turns are needed, but the template does not mark one range per turn; or a message in
            the loss that is not the assistant's has a weight.
    """
    indices = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    of_turns = [conversation.weights.get(index, 1.0) for index in indices]
    in_prompt = [index < conversation.first for index in indices]
    if train_on == "all" and (others := conversation.weights.keys() - indices):
        number = min(others)
        raise DataError(
            f"message {number + 1} has weight {conversation.weights[number]:g} and is the "
            f'{conversation.messages[number]["role"]}\'s: with data.train_on = "all", only messages of the '
            'assistant can have a weight\n  fix:  remove it, or set data.train_on = "assistant"'
        )
    single = any(weight != 1 for weight in of_turns) or any(in_prompt) or train_on == "last_assistant"
    if single and len(indices) != len(answers):
        raise DataError(
            f"the template marks {len(answers)} ranges for {len(indices)} turns of the assistant, so "
            "single turns cannot be located\n  fix:  put {% generation %} around each turn once, or set "
            'data.train_on = "assistant" and no weights'
        )
    weights = np.full(n_ids, conversation.weight * (train_on == "all"), np.float32)
    for number, (begin, end) in enumerate(answers):
        in_loss = True
        if train_on != "all":
            in_loss = not (single and in_prompt[number])
            in_loss &= train_on == "assistant" or number == len(answers) - 1
        weights[begin:end] = conversation.weight * (of_turns[number] if single else 1) * in_loss
    weights[0] = 0
    return weights
