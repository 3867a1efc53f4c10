"""Chat formats of Llama 2 and Llama 3. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import DataError
from toolkit.models.common.chat_format import (
    ChatFormat,
    ChatTokenizer,
    Message,
    Turns,
    exchanges,
    special_ids,
    texts,
)

_ROLES_LLAMA3 = ("system", "user", "assistant", "ipython")


class Llama3Format(ChatFormat):
    """Llama 3's format: a header with the role before each message, <|eot_id|> after it (Meta's
    ``ChatFormat``).

    No system message is added. The chat templates of Llama 3.1 and later add one with the date; if a
    tokenizer folder has such a template, the template is used instead.
    """

    name = fingerprint = "llama3"

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        return "<|start_header_id|>" in tokenizer.special_tokens

    def __init__(self, tokenizer: ChatTokenizer):
        super().__init__(tokenizer)
        names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        self._bos, self._start, self._end, self._eot = special_ids(tokenizer, names, self.name)

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        return self.encode_turns(messages).ids + (self._header("assistant") if generation_prompt else [])

    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        ids, answers = [self._bos], []
        for role, content in texts(messages):
            role = "ipython" if role == "tool" else role
            if role not in _ROLES_LLAMA3:
                raise DataError(f"message role {role!r}: Llama 3 has {', '.join(_ROLES_LLAMA3)}")
            ids += self._header(role)
            begin = len(ids)
            ids += [*self._tokenizer.encode(content.strip()), self._eot]
            if role == "assistant":
                answers.append((begin, len(ids)))
        return Turns(ids, answers)

    def _header(self, role: str) -> list[int]:
        encode = self._tokenizer.encode
        return [self._start, *encode(role), self._end, *encode("\n\n")]


class Llama2Format(ChatFormat):
    """Llama 2's format, ``[INST] question [/INST] answer`` between BOS and EOS (Meta's ``chat_completion``).

    A system message is part of the first question, between <<SYS>> marks. The tokenizer treats the marks and
    [INST] as plain text, so they cannot be distinguished from the same text in a message. There is no
    generation prompt: an answer directly follows the question.
    """

    name = fingerprint = "llama2"

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        return tokenizer.kind == "sentencepiece" and "[INST]" not in tokenizer.special_tokens

    def __init__(self, tokenizer: ChatTokenizer):
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise DataError(f"Llama 2's chat format needs BOS and EOS tokens, which {tokenizer.path} lacks")
        super().__init__(tokenizer)

    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        system, questions, answers = exchanges(messages, "Llama 2")
        if system is not None:
            questions[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{questions[0]}"
        questions = [f"[INST] {content.strip()} [/INST]" for content in questions]
        encode, turns = self._tokenizer.encode, Turns([], [])
        for question, answer in zip(questions, answers, strict=False):
            # No token of a SentencePiece model combines a space with the text before it.
            begin = len(turns.ids) + len(encode(question, bos=True))
            turns.ids.extend(encode(f"{question} {answer.strip()} ", bos=True, eos=True))
            turns.answers.append((begin, len(turns.ids)))
        turns.ids.extend(encode(questions[-1], bos=True) if len(questions) > len(answers) else [])
        return turns


FORMATS = {chat_format.name: chat_format for chat_format in (Llama2Format, Llama3Format)}
