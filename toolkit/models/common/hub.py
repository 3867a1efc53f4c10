"""A family's models on the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hub:
    """The repositories of a family.

    Attributes:
        owner: whose they are.
        published: name of the repository → ``model.name`` and ``model.flavor`` of its model.
        gated: a licence has to be accepted before a download.
    """

    owner: str
    published: Mapping[str, tuple[str, str]]
    gated: bool = False

    def published_name(self, text: str) -> str | None:
        """The repository that an id or the last part of a path means, in whatever case, if it means one."""
        stem = os.path.basename(text.rstrip("/")).lower()
        return next((name for name in self.published if name.lower() == stem), None)
