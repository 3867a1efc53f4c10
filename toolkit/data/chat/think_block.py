"""Where the prompt of an answer ends, and the think block with which a template may open one.

A template opens an answer in one way for a model that is to think and in another, such as with an empty think
block, for one that is not. The answers of a dialog may begin in either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from toolkit.errors import DataError
from toolkit.models.common.chat_format import Message, Rendered

SWITCH = "enable_thinking"
"""The variable by which templates open an answer for a model that thinks, or with an empty think block."""
_QUESTION: list[Message] = [{"role": "user", "content": "a"}]
DIALOG: list[Message] = [*_QUESTION, {"role": "assistant", "content": "b"}]
Places = list[tuple[int, int]]


class Render(Protocol):
    """Renders messages of one dialog by one template.

    Raises:
        DataError: the template rejects them.
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
    """The prompts of answers in one template, which ``render`` applies in each call.

    ``switches`` says if the template has a variable :data:`SWITCH`. With ``masks_empty`` an answer begins
    behind an empty think block.
    """

    def __init__(self, *, switches: bool, masks_empty: bool):
        self._switches, self._masks_empty = switches, masks_empty
        self._found: tuple[str | None, list[str]] | None = None
        self._marked: bool | None = None

    def differ(self, render: Render) -> bool:
        """Say if an answer opens in another way where the model is not to think."""
        own, others = self._openings(render)
        return any(other != own for other in others)

    def _openings(self, render: Render) -> tuple[str | None, list[str]]:
        if self._found is None:
            self._found = self._find_openings(render)
        return self._found

    def _find_openings(self, render: Render) -> tuple[str | None, list[str]]:
        """Find what the generation prompt adds to a dialog, and what it adds where the model is to think and
        where it is not, the longest first; none where the template does not let it be told."""
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
        """Return where the prompt of the answer that follows ``before`` ends in every text of ``whole``.

        The prompt is what the template writes as generation prompt. Where an answer opens in another way, it
        is that of a model that is to think, or of one that is not. None where there is none of them.
        """
        prompt = render(before, generation_prompt=True).text
        own, others = self._openings(render)
        prompts = [prompt]
        if own is not None and prompt.endswith(own):
            prompts += [prompt[: len(prompt) - len(own)] + other for other in others]
        fitting = (len(one) for one in prompts if all(it.text.startswith(one) for it in whole))
        return max(fitting, default=None) if self._masks_empty else next(fitting, None)

    def without(self, rendered: Rendered, messages: Sequence[Message], render: Render) -> Places:
        """Return what ``{% generation %}`` marks of ``messages`` without what the generation prompts write,
        such as an empty think block."""
        if self._marked is None:
            try:
                plain = partial(render, tools=None)
                short = plain(DIALOG, generation_prompt=False)
                self._marked = self._without(short, DIALOG, plain) != short.generated
            except DataError:  # no dialog for this template
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
    """Explain why data.mask_empty_thinking has nothing to mask."""
    return DataError(
        f"{name} {why}, so that no empty think block can be told for data.mask_empty_thinking\n"
        "  fix:  set data.mask_empty_thinking = false"
    )
