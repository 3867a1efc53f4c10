"""Chat format of Mistral. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat, ChatTokenizer, Message, Turns, exchanges

_MARKS = ("[INST]", "[/INST]")


class MistralFormat(ChatFormat):
    """Mistral's format: one BOS, an EOS after each answer, and the marks of the release's chat template:

    * 0.1 and 0.2: ``<s> [INST] question [/INST] answer</s> [INST] …``. [INST] is plain text, which cannot be
      distinguished from the same text in a message. The system message and an empty line precede the first
      question;
    * 0.3: ``<s>[INST] question[/INST] answer</s>[INST] …``. The marks are special tokens, and the system
      message precedes the last question;
    * Nemo: like 0.3, without spaces.

    The tokenizer's special tokens and spaces determine the release. There is no generation prompt: an answer
    directly follows the question.
    """

    name = fingerprint = "mistral"

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        return all(mark in tokenizer.special_tokens for mark in _MARKS)

    def __init__(self, tokenizer: ChatTokenizer):
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise DataError(f"Mistral's chat format needs BOS and EOS tokens, which {tokenizer.path} lacks")
        super().__init__(tokenizer)
        self._bos, self._eos = tokenizer.bos_id, tokenizer.eos_id
        self._marks = [tokenizer.special_tokens[mark] for mark in _MARKS] if self.fits(tokenizer) else None
        # SentencePiece adds a space before any text, tokenizer.json only at the beginning of a prompt.
        spaced = tokenizer.encode_after(self._bos, " a") == tokenizer.encode("a")
        self._space = " " if spaced else ""
        self._strips = spaced or tokenizer.kind == "sentencepiece"

    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        system, questions, answers = exchanges(messages, "Mistral")
        if system is not None:
            index = 0 if self._marks is None else -1
            questions[index] = f"{system}\n\n{questions[index]}"
        turns = Turns([self._bos], [])
        for index, question in enumerate(questions):
            answer = answers[index] if index < len(answers) else None
            prompt, both = self._exchange(question, answer, turns.ids[-1])
            if answer is not None:
                turns.answers.append((len(turns.ids) + prompt, len(turns.ids) + len(both)))
            turns.ids.extend(both)
        return turns

    def _exchange(self, question: str, answer: str | None, after: int) -> tuple[int, list[int]]:
        """Return the number of ids of the question, and the ids of the question and of the answer, if any,
        following the token ``after``."""
        encode, space = self._tokenizer.encode_after, self._space
        if self._marks is None:
            text = f"{space}[INST] {question} [/INST]"
            ids = encode(after, text if answer is None else f"{text} {answer}")
            # No token of a SentencePiece model combines a space with the text before it.
            prompt = len(encode(after, text))
        else:
            begin, end = self._marks
            ids = [begin, *encode(begin, space + question), end]
            prompt = len(ids)
            if answer is not None:
                ids += encode(end, space + (answer.strip() if self._strips else answer))
        return prompt, ids if answer is None else [*ids, self._eos]
