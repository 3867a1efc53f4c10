"""Locate the end of an answer's prompt, and the think block that a template may insert there.

A template may start an answer differently depending on whether thinking is enabled, for example with an empty
think block. The answers of a dialog may start in either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from toolkit.errors import DataError
from toolkit.models.common.chat_format import Message, Rendered

SWITCH = "enable_thinking"
"""Variable that makes templates start an answer with or without an empty think block."""
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
DIALOG: list[Message] = [*_QUESTION, {"role": "assistant", "content": "b"}]
Places = list[tuple[int, int]]


class Render(Protocol):
    """Renders messages of one dialog with one template.

    Raises:
        DataError: The template rejects them.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
    ) -> Rendered: ...


class AnswerPrompts:
    """Prompts of answers in one template; every method takes the template as ``render``.

    ``switches``: the template uses the variable :data:`SWITCH`. ``masks_empty``: an answer starts after an
    empty think block.
    """

    def __init__(self, *, switches: bool, masks_empty: bool):
        self._switches, self._masks_empty = switches, masks_empty
        self._found: tuple[str | None, list[str]] | None = None
        self._marked: bool | None = None

    def differ(self, render: Render) -> bool:
        """Return whether an answer starts differently when thinking is disabled."""
        own, others = self._openings(render)
        return any(other != own for other in others)

    def _openings(self, render: Render) -> tuple[str | None, list[str]]:
        if self._found is None:
            self._found = self._find_openings(render)
        return self._found

    def _find_openings(self, render: Render) -> tuple[str | None, list[str]]:
        """Return the text that the generation prompt adds to a dialog by default, and that added with
        thinking enabled and disabled, longest first; empty if they cannot be determined."""
        found: list[str | None] = []
        for thinking in (None, True, False) if self._switches else (None,):
            try:
                without, prompt = (
                    render(_QUESTION, generation_prompt=on, tools=None, thinking=thinking).text
                    for on in (False, True)
                )
            except DataError:
                return None, []
            found.append(prompt.removeprefix(without) if prompt.startswith(without) else None)
        own, *others = found
        return own, sorted(filter(None, others), key=len, reverse=True)

    def end(self, before: Sequence[Message], whole: Sequence[Rendered], render: Render) -> int | None:
        """Return the end of the prompt of the answer after ``before``, in every text of ``whole``.

        The prompt is the template's generation prompt, with thinking enabled or disabled if that makes a
        difference. Returns None if no prompt matches.
        """
        prompt = render(before, generation_prompt=True).text
        own, others = self._openings(render)
        prompts = [prompt]
        if own is not None and prompt.endswith(own):
            prompts += [prompt[: len(prompt) - len(own)] + other for other in others]
        fitting = (len(one) for one in prompts if all(it.text.startswith(one) for it in whole))
        return max(fitting, default=None) if self._masks_empty else next(fitting, None)

    def without(self, rendered: Rendered, messages: Sequence[Message], render: Render) -> Places:
        """Return the ranges marked by ``{% generation %}`` in ``messages``, excluding parts of generation
        prompts, such as an empty think block."""
        if self._marked is None:
            try:
                plain = partial(render, tools=None)
                short = plain(DIALOG, generation_prompt=False)
                self._marked = self._without(short, DIALOG, plain) != short.generated
            except DataError:  # the template rejects this dialog
                self._marked = False
        return self._without(rendered, messages, render) if self._marked else rendered.generated

    def _without(self, rendered: Rendered, messages: Sequence[Message], render: Render) -> Places:
        own, others = self._openings(render)
        longest = max(map(len, [own or "", *others]))
        found = list(rendered.generated)
        for index, message in enumerate(messages):
            if index and message.get("role") == "assistant":
                prompt = self.end(messages[:index], [rendered], render) or 0
                found = [
                    (prompt if prompt - longest <= begin < prompt < end else begin, end)
                    for begin, end in found
                ]
        return found


def no_empty_thinking(name: str, why: str) -> DataError:
    """Return the error for data.mask_empty_thinking if there is no empty think block."""
    return DataError(
        f"{name} {why}, so there is no empty think block for data.mask_empty_thinking to mask\n"
        "  fix:  set data.mask_empty_thinking = false"
    )
