"""Dialogs to token ids: the formats of families, and whatever a model's own template says.

A message is a mapping with ``role`` and ``content``. Every format takes the ids of special tokens from the
tokenizer and encodes the rest as plain text, so that "<|eot_id|>" or "</s>" in a message stays text and
cannot end its turn. BOS comes from the format, once, and from nowhere else.

:func:`chat_format` takes what is asked for, else the template that comes with the tokenizer
(:mod:`toolkit.data.chat.template`), else the format whose special tokens the tokenizer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.local_paths import expand_user
from toolkit.data.chat.base import ChatFormat
from toolkit.data.chat.template import ChatTemplate, compiled, read_template, template_beside
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.registry import chat_formats


def chat_format(
    tokenizer: Tokenizer,
    asked: str | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    training: bool = False,
) -> ChatFormat:
    """The format of ``tokenizer``'s model; ``asked`` is the name of a format, a jinja template or its file.

    ``variables`` are for a template to use. For ``training`` its ids do not depend on the day.

    Raises:
        DataError: no format can be told, the tokenizer lacks its tokens, or the template cannot be read.
    """
    known = chat_formats()
    if asked is None:
        found = template_beside(tokenizer, variables=variables, training=training)
        if found is not None:
            return found
        asked = next((name for name, form in known.items() if form.fits(tokenizer)), None)
    if asked is None:
        raise DataError(
            f"no chat format is known for {tokenizer.path}: there is no chat_template.jinja and no "
            f"chat_template in tokenizer_config.json beside it, and it has the tokens of none\n"
            f"  fix:  name {', '.join(known)} or the file of a jinja template"
        )
    if asked in known:
        _refuse_variables(asked, variables)
        return known[asked](tokenizer)
    name, source = _template(asked)
    return ChatTemplate(tokenizer, source, name=name, variables=variables, training=training)


def check_asked(asked: str, variables: Mapping[str, Any]) -> None:
    """See that a format is there, or a template can be read and uses ``variables``, without a tokenizer.

    Raises:
        DataError: it cannot, or does not.
    """
    if asked in chat_formats():
        _refuse_variables(asked, variables)
    else:
        compiled(*_template(asked), variables)


def template_text(asked: str) -> str | None:
    """The jinja template that is ``asked`` for; None where a family's format is.

    Raises:
        DataError: there is no such file.
    """
    return None if asked in chat_formats() else _template(asked)[1]


def _template(asked: str) -> tuple[str, str]:
    """Name and text of a template, which is given itself or by its file."""
    if "{{" in asked or "{%" in asked:
        return "given", asked
    path = expand_user(asked)
    if not path.is_file():
        raise DataError(
            f"chat format {asked!r}: there is no such format or file\n"
            f"  fix:  {', '.join(chat_formats())} or the file of a jinja template"
        )
    return asked, read_template(path)


def _refuse_variables(name: str, variables: Mapping[str, Any] | None) -> None:
    if variables:
        raise DataError(
            f"the format {name} has no variables, and is given {', '.join(variables)}\n"
            "  fix:  remove them, or name a template that uses them"
        )
