"""Dialogs to token ids: the formats of families, and whatever a model's own template says.

A message is a mapping with ``role`` and ``content``. Every format takes the ids of special tokens from the
tokenizer and encodes the rest as plain text, so that "<|eot_id|>" or "</s>" in a message stays text and
cannot end its turn. BOS comes from the format, once, and from nowhere else.

:func:`chat_format` takes what is asked for, else the template that comes with the tokenizer
(:mod:`toolkit.data.chat.template`), else the format whose special tokens the tokenizer has.
"""

from __future__ import annotations

from pathlib import Path

from toolkit.data.chat.base import ChatFormat
from toolkit.data.chat.template import ChatTemplate, template_beside
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.registry import chat_formats


def chat_format(tokenizer: Tokenizer, asked: str | None = None) -> ChatFormat:
    """The format of ``tokenizer``'s model; ``asked`` is the name of a format or the file of a jinja template.

    Raises:
        DataError: no format can be told, the tokenizer lacks its tokens, or the template cannot be read.
    """
    known = chat_formats()
    names = ", ".join(known)
    if asked in known:
        return known[asked](tokenizer)
    if asked is not None:
        path = Path(asked).expanduser()
        if not path.is_file():
            raise DataError(
                f"chat format {asked!r}: there is no such format or file\n"
                f"  fix:  {names} or the file of a jinja template"
            )
        return ChatTemplate.from_file(tokenizer, path)
    if (found := template_beside(tokenizer)) is not None:
        return found
    for form in known.values():
        if form.fits(tokenizer):
            return form(tokenizer)
    raise DataError(
        f"no chat format is known for {tokenizer.path}: there is no chat_template.jinja and no chat_template "
        f"in tokenizer_config.json beside it, and it has the tokens of none\n"
        f"  fix:  name {names} or the file of a jinja template"
    )
