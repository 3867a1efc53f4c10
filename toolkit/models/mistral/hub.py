"""Mistral's repositories on the Hugging Face Hub."""

from __future__ import annotations

import os

from toolkit.models.common.hub import Hub

_PUBLISHED = {
    "Mistral-7B-v0.1": ("mistral0.1", "7B"),
    "Mistral-7B-Instruct-v0.1": ("mistral0.1", "7B"),
    "Mistral-7B-Instruct-v0.2": ("mistral0.2", "7B"),
    "Mistral-7B-v0.3": ("mistral0.3", "7B"),
    "Mistral-7B-Instruct-v0.3": ("mistral0.3", "7B"),
    "Mistral-Nemo-Base-2407": ("mistral-nemo", "12B"),
    "Mistral-Nemo-Instruct-2407": ("mistral-nemo", "12B"),
}


def _published_name(text: str) -> str | None:
    stem = os.path.basename(text.rstrip("/")).lower()
    return next((name for name in _PUBLISHED if name.lower() == stem), None)


HUB = Hub("mistralai", _PUBLISHED, _published_name)
