"""Repositories of a model family on the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hub:
    """Repositories of a family.

    Attributes:
        owner: user or organization of the repositories.
        published: ``model.name`` and ``model.flavor`` by repository name.
        gated: downloading requires accepting a license.
    """

    owner: str
    published: Mapping[str, tuple[str, str]]
    gated: bool = False

    def published_name(self, text: str) -> str | None:
        """Return the repository named by an id or by the last component of a path, ignoring case, or None."""
        stem = os.path.basename(text.rstrip("/")).lower()
        return next((name for name in self.published if name.lower() == stem), None)
