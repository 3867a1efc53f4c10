"""Select a chat format: the format of a model family, or a model's own jinja template.

A message is a mapping with ``role`` and ``content``. Every format takes the ids of special tokens from the
tokenizer and encodes the rest as plain text, so that "<|eot_id|>" or "</s>" in a message stays text and
cannot end its turn. The format adds BOS, and only once.

:func:`chat_format` uses the requested format, else the tokenizer's own template
(:mod:`toolkit.data.chat.template`), else the format whose special tokens exist in the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.local_paths import expand_user
from toolkit.data.chat.template import ChatTemplate, compiled, read_template, refuse_unused, template_beside
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
    """Return the chat format of ``tokenizer``'s model, or the one requested by ``asked``, which is a format,
    a jinja template or a template file.

    ``variables`` are passed to a template. In ``training``, ids do not depend on the date.
    ``mask_empty_thinking`` excludes empty think blocks inserted by the template from the loss.

    Raises:
        DataError: No format can be determined, the tokenizer lacks its tokens, the template cannot be read,
            or it ignores an option.
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
            raise no_empty_thinking(f"chat template {form.name}", "starts every answer in the same way")
        return form
    if asked is None:
        raise DataError(
            f"no chat format is known for {tokenizer.path}: there is no chat_template.jinja and no "
            f"chat_template in tokenizer_config.json next to it, and it has no known format's tokens\n"
            f"  fix:  use {', '.join(known)} or a file with a jinja template"
        )
    _refuse_options(asked, variables, mask_empty_thinking)
    return known[asked](tokenizer)


def check_asked(asked: str, variables: Mapping[str, Any], mask_empty_thinking: bool = False) -> None:
    """Check, without a tokenizer, that a format exists, or that a template can be read and uses the options.

    Raises:
        DataError: The check fails.
    """
    if asked in chat_formats():
        _refuse_options(asked, variables, mask_empty_thinking)
    else:
        name, source = _template(asked)
        refuse_unused(name, compiled(name, source).used, variables, mask_empty_thinking)


def template_text(asked: str) -> str | None:
    """Return the requested jinja template; None if a family's format was requested.

    Raises:
        DataError: The file does not exist.
    """
    return None if asked in chat_formats() else _template(asked)[1]


def _template(asked: str) -> tuple[str, str]:
    """Return name and text of a template given as text or as a file."""
    if "{{" in asked or "{%" in asked:
        return "given", asked
    path = expand_user(asked)
    if not path.is_file():
        raise DataError(
            f"chat format {asked!r}: there is no such format or file\n"
            f"  fix:  use {', '.join(chat_formats())} or a file with a jinja template"
        )
    return asked, read_template(path)


def _refuse_options(name: str, variables: Mapping[str, Any], mask_empty_thinking: bool) -> None:
    if variables:
        raise DataError(
            f"the format {name} has no variables, but {', '.join(variables)} are set\n"
            "  fix:  remove them, or use a template with these variables"
        )
    if mask_empty_thinking:
        raise no_empty_thinking(f"the format {name}", "has no think block")
