"""The configs that ship with the toolkit (``train_configs/``), by name, such as ``debug_model`` or
``fine_tune/chat``. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """Return the folder of the presets: next to the package in a checkout, inside it once installed."""
    inside = PACKAGE / "train_configs"
    return inside if inside.is_dir() else PACKAGE.parent / "train_configs"


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.relative_to(folder()).with_suffix("").as_posix() for path in folder().rglob("*.toml"))


def find(path: str, *, inside: str = "") -> str:
    """Return ``path`` relative to the folder ``inside`` if that file exists, else the preset of that name,
    with or without ``.toml``, else ``path`` in ``inside``."""
    file = os.path.join(inside, path)
    if os.path.exists(file):
        return file
    name = path.removesuffix(".toml")
    return str(folder() / f"{name}.toml") if name in names() else file
