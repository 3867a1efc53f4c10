"""Initial weights that depend only on the seed and the parameter's name, not on the mesh.

A parameter is divided into blocks of rows, each drawn by a generator keyed by a hash of (seed, name, block).
A rank draws the blocks that overlap its shard, on CPU in fp32, then slices, casts and copies them. Every
layout gets the same bits, and no rank communicates or creates full parameters.

The generators are numpy's, because those have 128-bit keys; torch's CPU generator uses only 32 bits of its
seed, so that blocks of a large model would collide. numpy's also produce the same bits on every CPU; torch's
depend on the vector width. Drawing takes about 8 ns per element and thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from toolkit.distributed.dtensor import Fillable, clean_name, fillable_shard
from toolkit.launcher.environment import threads
from toolkit.models.common.parameter_table import Init

BLOCK_ELEMENTS = 1 << 18
"""Maximum number of elements in a block, unless a single row has more. Changing it changes all initial
weights."""


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, Tensor | Fillable]], seed: int, rules: Callable[[str], Init]
) -> None:
    """Initialize each parameter, DTensor or plain, in place, with the same bits on any mesh.

    ``rules`` maps a parameter's name, without wrapper prefixes, to its distribution.

    Raises:
        ValueError: a parameter is on the meta device.
    """
    with ThreadPoolExecutor(threads()) as pool:
        for wrapped_name, parameter in parameters:
            name = clean_name(wrapped_name)
            local, offset = fillable_shard(parameter)
            if local.is_meta:
                raise ValueError(f"{name} is on the meta device: call to_empty before initialize")
            rule = rules(name)
            if rule.std == 0:
                local.fill_(rule.mean)
            elif math.prod(local.shape):
                fills = _fills(local, offset, parameter.shape, rule, f"{seed}/{name}")
                for future in [pool.submit(fill) for fill in fills]:  # in parallel, one parameter at a time
                    future.result()


def initial_rows(name: str, seed: int, rule: Init, shape: Sequence[int], rows: slice) -> Tensor:
    """Return rows of a parameter of ``shape`` in fp32, with the values of :func:`initialize`."""
    out = torch.empty(rows.stop - rows.start, *shape[1:])
    if rule.std == 0:
        return out.fill_(rule.mean)
    for fill in _fills(out, (rows.start, *(0 for _ in shape[1:])), shape, rule, f"{seed}/{name}"):
        fill()
    return out


def _fills(
    local: Tensor | Fillable, offset: Sequence[int], shape: Sequence[int], rule: Init, key: str
) -> Iterator[Callable[[], None]]:
    """Yield functions, callable in any order, that each draw a block and copy its overlap into ``local``."""
    columns = tuple(
        slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)
    )
    first, last = offset[0], offset[0] + local.shape[0]

    def fill(block: int, rows: tuple[int, int]) -> None:
        values = _draw(f"{key}/{block}", (rows[1] - rows[0], *shape[1:]), rule)
        start, stop = max(rows[0], first), min(rows[1], last)
        overlap = (slice(start - rows[0], stop - rows[0]), *columns)
        drawn = torch.from_numpy(np.ascontiguousarray(values[overlap]))
        part = local[start - first : stop - first]
        # Cast before moving it to a GPU, which halves the bytes.
        part.copy_(drawn.to(part.dtype) if isinstance(part, Tensor) else drawn)

    for block, rows in _row_blocks(shape, first, last):
        yield partial(fill, block, rows)


def _row_blocks(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (index, (start row, end row)) of each block that overlaps the rows ``first`` to ``last`` − 1."""
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    for block in range(first // rows, -(-last // rows)):
        yield block, (block * rows, min((block + 1) * rows, shape[0]))


def _draw(key: str, shape: Sequence[int], rule: Init) -> np.ndarray:
    """Draw the full block in fp32; values beyond the cut are redrawn at the end."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    values = generator.standard_normal(math.prod(shape), dtype=np.float32)
    while math.isfinite(rule.cut) and len(beyond := np.flatnonzero(np.abs(values) > rule.cut)):
        values[beyond] = generator.standard_normal(len(beyond), dtype=np.float32)
    values *= np.float32(rule.std)
    values += np.float32(rule.mean)
    return values.reshape(shape)
