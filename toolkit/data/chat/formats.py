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
from toolkit.data.chat.template import (
    ChatTemplate,
    compiled,
    read_template,
    refuse_unused,
    template_beside,
)
from toolkit.data.chat.think_block import no_empty_thinking
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.models.common.chat_format import ChatFormat
from toolkit.models.registry import chat_formats


def chat_format(
    tokenizer: Tokenizer,
    asked: str | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    training: bool = False,
    mask_empty_thinking: bool = False,
) -> ChatFormat:
    """The format of ``tokenizer``'s model; ``asked`` is the name of a format, a jinja template or its file.

    ``variables`` are for a template to use. For ``training`` its ids do not depend on the day.
    ``mask_empty_thinking`` leaves an empty think block that the template writes out of what is learnt.

    Raises:
        DataError: no format can be told, the tokenizer lacks its tokens, the template cannot be read, or it
            has no use for an option.
    """
    known = chat_formats()
    variables = variables or {}
    options: dict[str, Any] = {
        "variables": variables,
        "training": training,
        "mask_empty_thinking": mask_empty_thinking,
    }
    form = None
    if asked is None:
        form = template_beside(tokenizer, **options)
        if form is None:
            asked = next((name for name, kind in known.items() if kind.fits(tokenizer)), None)
    elif asked not in known:
        name, source = _template(asked)
        form = ChatTemplate(tokenizer, source, name=name, **options)
    if form is not None:
        refuse_unused(form.name, form.used, variables, mask_empty_thinking)
        if mask_empty_thinking and not form.has_empty_thinking:
            raise no_empty_thinking(f"chat template {form.name}", "opens every answer alike")
        return form
    if asked is None:
        raise DataError(
            f"no chat format is known for {tokenizer.path}: there is no chat_template.jinja and no "
            f"chat_template in tokenizer_config.json beside it, and it has the tokens of none\n"
            f"  fix:  name {', '.join(known)} or the file of a jinja template"
        )
    _refuse_options(asked, variables, mask_empty_thinking)
    return known[asked](tokenizer)


def check_asked(asked: str, variables: Mapping[str, Any], mask_empty_thinking: bool = False) -> None:
    """See that a format is there, or a template can be read and uses the options, without a tokenizer.

    Raises:
        DataError: it cannot, or does not.
    """
    if asked in chat_formats():
        _refuse_options(asked, variables, mask_empty_thinking)
    else:
        name, source = _template(asked)
        refuse_unused(name, compiled(name, source).used, variables, mask_empty_thinking)


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


def _refuse_options(name: str, variables: Mapping[str, Any], mask_empty_thinking: bool) -> None:
    if variables:
        raise DataError(
            f"the format {name} has no variables, and is given {', '.join(variables)}\n"
            "  fix:  remove them, or name a template that uses them"
        )
    if mask_empty_thinking:
        raise no_empty_thinking(f"the format {name}", "writes no think block")
