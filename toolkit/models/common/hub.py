"""A family's models on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hub:
    """The repositories of a family.

    Attributes:
        owner: whose they are.
        published: name of the repository → ``model.name`` and ``model.flavor`` of its model.
        published_name: the one of those that an id or the last part of a path means, if it means one.
        gated: a licence has to be accepted before a download.
    """

    owner: str
    published: Mapping[str, tuple[str, str]]
    published_name: Callable[[str], str | None]
    gated: bool = False
