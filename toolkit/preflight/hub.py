"""Meta's models on the Hugging Face Hub: what they are called there and here, and how to get one."""

from __future__ import annotations

import os
import re

from toolkit.errors import closest

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
    """The variant that was trained on dialogues."""
    return name.replace("-hf", "-chat-hf") if name.endswith("-hf") else f"{name}-Instruct"


PUBLISHED = {name: size for name, size in _SIZES.items() if name != _ONLY_INSTRUCT} | {
    _instruct(name): size for name, size in _SIZES.items()
}
"""Repositories of meta-llama, and the name and flavor of their models here."""

_MISTAKEN = {
    "llama-3-8b": "Meta-Llama-3-8B",
    "llama-3-70b": "Meta-Llama-3-70B",
    "llama-3-405b": "Llama-3.1-405B",
    "llama-3-1b": "Llama-3.2-1B",
    "llama-3-3b": "Llama-3.2-3B",
    "llama-3.3-70b": "Llama-3.3-70B",
}
"""Names that documents use for repositories that do not exist under them."""

_LOOKS_PUBLISHED = re.compile(r"(meta-)?llama-\d", re.IGNORECASE)
_LOOKS_LIKE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def published_name(text: str) -> str | None:
    """Return the Hub's name of the model that an id or the last part of a path means, if it means one."""
    stem = os.path.basename(text.rstrip("/"))
    if not _LOOKS_PUBLISHED.match(stem):
        return None
    lowered = re.sub(r"^meta-(?=llama-3\.\d)", "", stem.lower())
    mistaken = _MISTAKEN.get(lowered.removesuffix("-instruct"))
    if mistaken:
        alone = mistaken != _ONLY_INSTRUCT and not lowered.endswith("-instruct")
        return mistaken if alone else _instruct(mistaken)
    return closest(lowered, PUBLISHED)


def download_line(path: str) -> str | None:
    """How to get the model that ``path``, where there is nothing, seems to mean; None where it means none."""
    published = published_name(path)
    if published is None:
        if not _LOOKS_LIKE_ID.fullmatch(path):
            return None
        local = f"./{os.path.basename(path)}"
        return (
            f"hf download {path} --local-dir {local} fetches it from the Hugging Face Hub; then name {local}"
        )
    stem = os.path.basename(path.rstrip("/"))
    meant = "" if stem.lower() == published.lower() else f"did you mean {published}? "
    owner = path.rstrip("/").removesuffix(stem)
    local = f"./{published}" if meant or owner == "meta-llama/" else path
    repository = f"meta-llama/{published}"
    return (
        f"{meant}hf download {repository} --local-dir {local} fetches it from the Hugging Face Hub; then "
        f"name {local}. It is gated: first accept the licence on https://huggingface.co/{repository} and run "
        "hf auth login"
    )
