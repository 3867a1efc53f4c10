"""The torch that a run will meet, found without importing it."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache  # a file is read for it
def torch_version() -> tuple[int, int] | None:
    """Major and minor, without importing it."""
    try:
        major, minor, *_ = importlib.metadata.version("torch").split(".")
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def torch_before(needed: tuple[int, int]) -> str | None:
    """The version of torch if it is older than ``needed``."""
    version = torch_version()
    return f"{version[0]}.{version[1]}" if version and version < needed else None
