"""Dialogs to token ids: the formats of Llama 2 and Llama 3, and whatever a model's own template says.

A message is a mapping with ``role`` and ``content``. Every format takes the ids of special tokens from the
tokenizer and encodes the rest as plain text, so that "<|eot_id|>" or "</s>" in a message stays text and
cannot end its turn. BOS comes from the format, once, and from nowhere else.

:func:`chat_format` takes what is asked for, else the template that comes with the tokenizer
(:mod:`toolkit.data.chat.template`), else the format whose special tokens the tokenizer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.data.chat.base import ChatFormat, Message
from toolkit.data.chat.template import ChatTemplate, template_beside
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

FORMATS = ("llama2", "llama3")

_ROLES_LLAMA3 = ("system", "user", "assistant", "ipython")


def chat_format(tokenizer: Tokenizer, asked: str | None = None) -> ChatFormat:
    """The format of ``tokenizer``'s model; ``asked`` is "llama2", "llama3" or the file of a jinja template.

    Raises:
        DataError: no format can be told, the tokenizer lacks its tokens, or the template cannot be read.
    """
    if asked in FORMATS:
        return Llama2Format(tokenizer) if asked == "llama2" else Llama3Format(tokenizer)
    if asked is not None:
        return ChatTemplate.from_file(tokenizer, Path(asked).expanduser())
    if (found := template_beside(tokenizer)) is not None:
        return found
    if "<|start_header_id|>" in tokenizer.special_tokens:
        return Llama3Format(tokenizer)
    if tokenizer.kind == "sentencepiece":
        return Llama2Format(tokenizer)
    raise DataError(
        f"no chat format is known for {tokenizer.path}: there is no chat_template.jinja and no chat_template "
        f"in tokenizer_config.json beside it, and it has no <|start_header_id|>\n"
        f"  fix:  name {', '.join(FORMATS)} or the file of a jinja template"
    )


class Llama3Format(ChatFormat):
    """Llama 3's: each message under a header with its role, ended by <|eot_id|> (Meta's ``ChatFormat``).

    No system message is added. The templates of Llama 3.1 and later add one with the date: that is what a
    folder with such a template gets.
    """

    name = "llama3"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        self._bos, self._start, self._end, self._eot = special_ids(tokenizer, names, self.name)
        self.stop_ids = tokenizer.stop_ids

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        ids = [self._bos]
        for role, content in texts(messages):
            role = "ipython" if role == "tool" else role
            if role not in _ROLES_LLAMA3:
                raise DataError(f"message role {role!r}: Llama 3 has {', '.join(_ROLES_LLAMA3)}")
            ids += [*self._header(role), *self._tokenizer.encode(content.strip()), self._eot]
        return ids + (self._header("assistant") if generation_prompt else [])

    def _header(self, role: str) -> list[int]:
        encode = self._tokenizer.encode
        return [self._start, *encode(role), self._end, *encode("\n\n")]


class Llama2Format(ChatFormat):
    """Llama 2's: ``[INST] question [/INST] answer`` between BOS and EOS (Meta's ``chat_completion``).

    A system message goes into the first question, between <<SYS>> marks. Those marks and [INST] are text to
    the tokenizer, so that this format cannot tell them from a message that holds them. An answer is opened by
    the question's end: there is no generation prompt.
    """

    name = "llama2"

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.bos_id is None or tokenizer.eos_id is None:
            raise DataError(f"Llama 2's chat format needs BOS and EOS, which {tokenizer.path} has not")
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids

    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        system = ""
        (role, content), *rest = texts(messages)
        if role == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        else:
            rest = [(role, content), *rest]
        roles = [role for role, _ in rest]
        if not rest or roles != [("user", "assistant")[index % 2] for index in range(len(rest))]:
            raise DataError(
                f"message roles {', '.join(roles) or 'system alone'}: Llama 2 takes user and assistant in "
                f"turns, after at most one system message"
            )
        questions = [f"[INST] {(system + rest[0][1]).strip()} [/INST]"]
        questions += [f"[INST] {content.strip()} [/INST]" for _, content in rest[2::2]]
        answers = [content.strip() for _, content in rest[1::2]]
        encode, ids = self._tokenizer.encode, []
        for question, answer in zip(questions, answers, strict=False):
            ids += encode(f"{question} {answer} ", bos=True, eos=True)
        return ids + (encode(questions[-1], bos=True) if len(questions) > len(answers) else [])


def special_ids(tokenizer: Tokenizer, names: Sequence[str], wanted_by: str) -> list[int]:
    """Ids of the special tokens ``names``.

    Raises:
        DataError: the tokenizer lacks some of them.
    """
    if missing := [name for name in names if name not in tokenizer.special_tokens]:
        raise DataError(f"chat format {wanted_by} needs {', '.join(missing)}, which {tokenizer.path} has not")
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
