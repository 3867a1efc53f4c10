"""Meta's repositories on the Hugging Face Hub."""

from __future__ import annotations

import os
import re

from toolkit.errors import closest
from toolkit.models.common.hub import Hub

_SIZES = {
    "Llama-2-7b-hf": ("llama2", "7B"),
    "Llama-2-13b-hf": ("llama2", "13B"),
    "Llama-2-70b-hf": ("llama2", "70B"),
    "Meta-Llama-3-8B": ("llama3.0", "8B"),
    "Meta-Llama-3-70B": ("llama3.0", "70B"),
    "Llama-3.1-8B": ("llama3.1", "8B"),
    "Llama-3.1-70B": ("llama3.1", "70B"),
    "Llama-3.1-405B": ("llama3.1", "405B"),
    "Llama-3.2-1B": ("llama3.2", "1B"),
    "Llama-3.2-3B": ("llama3.2", "3B"),
    "Llama-3.3-70B": ("llama3.3", "70B"),
}
_ONLY_INSTRUCT = "Llama-3.3-70B"


def _instruct(name: str) -> str:
    """Return the repository name of the instruction-tuned variant."""
    return name.replace("-hf", "-chat-hf") if name.endswith("-hf") else f"{name}-Instruct"


_PUBLISHED = {name: size for name, size in _SIZES.items() if name != _ONLY_INSTRUCT} | {
    _instruct(name): size for name, size in _SIZES.items()
}
_WRONG_NAMES = {
    "llama-3-8b": "Meta-Llama-3-8B",
    "llama-3-70b": "Meta-Llama-3-70B",
    "llama-3-405b": "Llama-3.1-405B",
    "llama-3-1b": "Llama-3.2-1B",
    "llama-3-3b": "Llama-3.2-3B",
    "llama-3.3-70b": "Llama-3.3-70B",
}
"""Common aliases of repository names."""

_LOOKS_PUBLISHED = re.compile(r"(meta-)?llama-[1-3]", re.IGNORECASE)


class _MetaHub(Hub):
    def published_name(self, text: str) -> str | None:
        stem = os.path.basename(text.rstrip("/"))
        if not _LOOKS_PUBLISHED.match(stem):
            return None
        lowered = re.sub(r"^meta-(?=llama-3\.\d)", "", stem.lower())
        name = _WRONG_NAMES.get(lowered.removesuffix("-instruct"))
        if name:
            base = name != _ONLY_INSTRUCT and not lowered.endswith("-instruct")
            return name if base else _instruct(name)
        return closest(lowered, _PUBLISHED)


HUB = _MetaHub("meta-llama", _PUBLISHED, gated=True)
