"""Models on the Hugging Face Hub: find the model that a name refers to, and how to download it."""

from __future__ import annotations

import os
import re

from toolkit.models.common.hub import Hub
from toolkit.models.registry import families, spec

_LOOKS_LIKE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def published(text: str) -> tuple[Hub, str] | None:
    """Return the hub and model name to which a repository id or the last path component refers, or None."""
    for hub in (spec(family).hub() for family in families()):
        if hub is not None and (name := hub.published_name(text)) is not None:
            return hub, name
    return None


def download_line(path: str) -> str | None:
    """Return how to download the model to which a missing ``path`` probably refers, or None."""
    match = published(path)
    if match is None:
        if not _LOOKS_LIKE_ID.fullmatch(path):
            return None
        local = f"./{os.path.basename(path)}"
        return _line(path, local)
    hub, name = match
    stem = os.path.basename(path.rstrip("/"))
    meant = "" if stem.lower() == name.lower() else f"did you mean {name}? "
    local = f"./{name}" if meant or path.rstrip("/").removesuffix(stem) == f"{hub.owner}/" else path
    repository = f"{hub.owner}/{name}"
    line = meant + _line(repository, local)
    if hub.gated:
        line += (
            f". It is gated: first accept the license on https://huggingface.co/{repository} and run "
            "hf auth login"
        )
    return line


def _line(repository: str, local: str) -> str:
    download = f"hf download {repository} --local-dir {local}"
    return f"{download} downloads it from the Hugging Face Hub; then use {local}"
