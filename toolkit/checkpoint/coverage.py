"""Checks that the chunks of an index make up each tensor once and whole, in bytes of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata


def coverage_problem(
    tensors: Mapping[str, TensorStorageMetadata], stored: Mapping[MetadataIndex, Any]
) -> str | None:
    """Name what is wrong with the chunks of ``tensors`` or with where they are ``stored``, or None."""
    for name, entry in tensors.items():
        if not all(_lies_inside(chunk, entry.size) for chunk in entry.chunks):
            return f"a chunk of {name} lies outside its shape {tuple(entry.size)}"
        if not _tiles(entry.size, entry.chunks):
            return f"the chunks of {name} overlap or leave holes in its shape {tuple(entry.size)}"
        filled = [chunk for chunk in entry.chunks if all(chunk.sizes)]
        if any(MetadataIndex(name, chunk.offsets) not in stored for chunk in filled):
            return f"a chunk of {name} is stored nowhere"
    spans = sorted((it.relative_path, it.offset, it.offset + it.length, at.fqn) for at, it in stored.items())
    for (file, _, end, name), (other_file, begin, _, other) in pairwise(spans):
        if file == other_file and begin < end:
            return f"{name} and {other} have the same bytes of {file}"
    return None


def _lies_inside(chunk: ChunkStorageMetadata, shape: Sequence[int]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _tiles(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Check that ``chunks`` fill ``shape`` without overlap.

    A box is known by its corners, counted +1 or -1 by how many of their coordinates are ends: boxes fill
    another one exactly where the counts of theirs sum to those of the other.
    """
    corners: Counter[tuple[int, ...]] = Counter()

    def count(offsets: Sequence[int], sizes: Sequence[int], weight: int) -> None:
        edges = [((start, 1), (start + size, -1)) for start, size in zip(offsets, sizes, strict=True)]
        for corner in product(*edges):
            sign = weight
            for _, side in corner:
                sign *= side
            corners[tuple(place for place, _ in corner)] += sign

    count([0] * len(shape), shape, -1)
    for chunk in chunks:
        count(chunk.offsets, chunk.sizes, 1)
    return not any(corners.values())
