"""Check that the chunks of an index cover each tensor exactly, without overlapping bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata


def coverage_problem(
    tensors: Mapping[str, TensorStorageMetadata], stored: Mapping[MetadataIndex, Any]
) -> str | None:
    """Return a problem with the chunks of ``tensors`` or with their ``stored`` locations, or None."""
    for name, entry in tensors.items():
        if not all(_lies_inside(chunk, entry.size) for chunk in entry.chunks):
            return f"a chunk of {name} is outside its shape {tuple(entry.size)}"
        if not _tiles(entry.size, entry.chunks):
            return f"the chunks of {name} overlap or leave gaps in its shape {tuple(entry.size)}"
        nonempty = [chunk for chunk in entry.chunks if all(chunk.sizes)]
        if any(MetadataIndex(name, chunk.offsets) not in stored for chunk in nonempty):
            return f"a chunk of {name} is not stored"
    spans = sorted((it.relative_path, it.offset, it.offset + it.length, at.fqn) for at, it in stored.items())
    for (file, _, end, name), (other_file, begin, _, other) in pairwise(spans):
        if file == other_file and begin < end:
            return f"{name} and {other} share bytes of {file}"
    return None


def _lies_inside(chunk: ChunkStorageMetadata, shape: Sequence[int]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _tiles(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether ``chunks`` tile ``shape`` exactly.

    The weight of a box's corner is the product of +1 per start coordinate and -1 per end coordinate. Boxes
    tile another box if and only if their weights, summed at each point, equal its weights.
    """
    corners: Counter[tuple[int, ...]] = Counter()

    def count(offsets: Sequence[int], sizes: Sequence[int], weight: int) -> None:
        edges = [((start, 1), (start + size, -1)) for start, size in zip(offsets, sizes, strict=True)]
        for corner in product(*edges):
            sign = weight
            for _, side in corner:
                sign *= side
            corners[tuple(coordinate for coordinate, _ in corner)] += sign

    count([0] * len(shape), shape, -1)
    for chunk in chunks:
        count(chunk.offsets, chunk.sizes, 1)
    return not any(corners.values())
