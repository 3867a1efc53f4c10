"""Parsing of ``parallelism.elastic_meshes``, such as "dp_shard=3 tp=2": meshes for other node counts."""

from __future__ import annotations

from toolkit.config.types import MAX_RANKS
from toolkit.launcher.environment import is_number
from toolkit.parallel.dims import DEGREES, ParallelDims


def parse_mesh(text: str) -> ParallelDims | None:
    """Parse a mesh; dimensions missing from ``text`` have degree 1. Returns None if it is invalid."""
    sizes = dict.fromkeys(DEGREES, 0)
    for word in text.split():
        name, _, size = word.partition("=")
        if sizes.get(name) != 0 or not is_number(size) or not 1 <= int(size) <= MAX_RANKS:
            return None
        sizes[name] = int(size)
    return ParallelDims(**{name: size or 1 for name, size in sizes.items()}) if text.split() else None


def mesh_flags(mesh: ParallelDims) -> list[str]:
    """Return the command-line flags for ``mesh``."""
    return [f"--{key}={getattr(mesh, name)}" for name, key in DEGREES.items()]
