"""Mistral's repositories on the Hugging Face Hub."""

from __future__ import annotations

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


HUB = Hub("mistralai", _PUBLISHED)
