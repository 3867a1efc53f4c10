"""The interface of every way in which a dialog becomes token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class ChatFormat(ABC):
    """How a dialog is laid out for a model.

    Attributes:
        name: "llama2", "llama3" or the file of a template.
        stop_ids: the tokens at which an answer ends.
    """

    name: str
    stop_ids: tuple[int, ...]

    @abstractmethod
    def encode(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        """Ids of the dialog, BOS included where the format has it; ``generation_prompt`` opens the answer
        that is to be generated.

        Raises:
            DataError: messages that the format has no place for.
        """
