"""The prompts of Mistral. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat, ChatTokenizer, Message, Turns, exchanges

_MARKS = ("[INST]", "[/INST]")


class MistralFormat(ChatFormat):
    """Mistral's: one BOS, an EOS after each answer, and marks as the templates of the releases have them:

    * 0.1 and 0.2: ``<s> [INST] question [/INST] answer</s> [INST] …``, where [INST] is text to the tokenizer
      and cannot be told from a message's; a system message and an empty line begin the first question;
    * 0.3: ``<s>[INST] question[/INST] answer</s>[INST] …`` around tokens of their own, and the system message
      begins the last question;
    * Nemo: the same without spaces.

    The tokens and spaces of the tokenizer tell which. An answer is opened by the question's end: there is no
    generation prompt.
    """

    name = fingerprint = "mistral"

    @classmethod
    def fits(cls, tokenizer: ChatTokenizer) -> bool:
        return all(mark in tokenizer.special_tokens for mark in _MARKS)

    def __init__(self, tokenizer: ChatTokenizer):
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise DataError(f"Mistral's chat format needs BOS and EOS, which {tokenizer.path} has not")
        self._tokenizer = tokenizer
        self._bos, self._eos = tokenizer.bos_id, tokenizer.eos_id
        self.stop_ids = tokenizer.stop_ids
        self._marks = [tokenizer.special_tokens[mark] for mark in _MARKS] if self.fits(tokenizer) else None
        # SentencePiece puts a space before a text by itself, tokenizer.json before that of a prompt alone.
        spaced = tokenizer.encode_after(self._bos, " a") == tokenizer.encode("a")
        self._space = " " if spaced else ""
        self._strips = spaced or tokenizer.kind == "sentencepiece"

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        return self.encode_turns(messages).ids

    def encode_turns(self, messages: Sequence[Message]) -> Turns:
        system, questions, answers = exchanges(messages, "Mistral")
        if system is not None:
            at = 0 if self._marks is None else -1
            questions[at] = f"{system}\n\n{questions[at]}"
        turns = Turns([self._bos], [])
        for index, question in enumerate(questions):
            answer = answers[index] if index < len(answers) else None
            prompt, both = self._exchange(question, answer, turns.ids[-1])
            if answer is not None:
                turns.answers.append((len(turns.ids) + prompt, len(turns.ids) + len(both)))
            turns.ids.extend(both)
        return turns

    def _exchange(self, question: str, answer: str | None, after: int) -> tuple[int, list[int]]:
        """The ids of a question and its answer, if it has one, that follow the token ``after``, and how many
        of them are the question's."""
        encode, space = self._tokenizer.encode_after, self._space
        if self._marks is None:
            asked = f"{space}[INST] {question} [/INST]"
            ids = encode(after, asked if answer is None else f"{asked} {answer}")
            # No token of such a tokenizer holds a space and what is before it.
            prompt = len(encode(after, asked))
        else:
            begin, end = self._marks
            ids = [begin, *encode(begin, space + question), end]
            prompt = len(ids)
            if answer is not None:
                ids += encode(end, space + (answer.strip() if self._strips else answer))
        return prompt, ids if answer is None else [*ids, self._eos]
