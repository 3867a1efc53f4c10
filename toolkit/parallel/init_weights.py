"""Initial weights that depend on the seed and the parameter's name alone, not on the mesh.

A parameter is cut into blocks of whole rows. A block's numbers come from a generator keyed by a hash
of (seed, name, block), and a rank draws only the blocks that its shard overlaps, on CPU in fp32, then
cuts, casts and copies. Every layout so gets the same bits: neither a full parameter nor
communication is needed.

Generators are numpy's: a key of 128 bits (torch's CPU generator keeps 32 of its seed, and blocks of a
large model would collide) and the same bits on every CPU (torch's depend on its vector width).
About 8 ns a number and thread.
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

from toolkit.distributed.dtensor import Filled, clean_name, part_to_fill
from toolkit.launcher.environment import threads
from toolkit.models.common.table import Init

BLOCK_ELEMENTS = 1 << 18
"""Numbers in a block, at most, unless a single row has more. Changing it changes every initialisation."""


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, Tensor | Filled]], seed: int, rules: Callable[[str], Init]
) -> None:
    """Fill each parameter, DTensor or plain, in place; bit-identical on any mesh.

    ``rules`` gives the distribution of a parameter by its name without wrappers' prefixes.

    Raises:
        ValueError: a parameter is on the meta device and has no storage to fill.
    """
    with ThreadPoolExecutor(threads()) as pool:
        for wrapped_name, parameter in parameters:
            name = clean_name(wrapped_name)
            local, offset = part_to_fill(parameter)
            if local.is_meta:
                raise ValueError(f"{name} is on the meta device: call to_empty before initialize")
            rule = rules(name)
            if rule.std == 0:
                local.fill_(rule.mean)
            elif math.prod(local.shape):
                fills = _fills(local, offset, parameter.shape, rule, f"{seed}/{name}")
                for done in [pool.submit(fill) for fill in fills]:  # in parallel, a parameter at a time
                    done.result()


def initial_rows(name: str, seed: int, rule: Init, shape: Sequence[int], rows: slice) -> Tensor:
    """Rows of a parameter of ``shape`` as :func:`initialize` fills them, in fp32."""
    part = torch.empty(rows.stop - rows.start, *shape[1:])
    if rule.std == 0:
        return part.fill_(rule.mean)
    for fill in _fills(part, (rows.start, *(0 for _ in shape[1:])), shape, rule, f"{seed}/{name}"):
        fill()
    return part


def _fills(
    local: Tensor | Filled, offset: Sequence[int], shape: Sequence[int], rule: Init, key: str
) -> Iterator[Callable[[], None]]:
    """Calls that each draw a block and copy its part into ``local``, in any order."""
    columns = tuple(
        slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)
    )
    first, last = offset[0], offset[0] + local.shape[0]

    def one(block: int, rows: tuple[int, int]) -> None:
        numbers = _draw(f"{key}/{block}", (rows[1] - rows[0], *shape[1:]), rule)
        start, stop = max(rows[0], first), min(rows[1], last)
        mine = (slice(start - rows[0], stop - rows[0]), *columns)
        local[start - first : stop - first].copy_(torch.from_numpy(np.ascontiguousarray(numbers[mine])))

    for block, rows in _row_blocks(shape, first, last):
        yield partial(one, block, rows)


def _row_blocks(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(index, (start row, end row)) of each block that overlaps rows ``first`` … ``last`` − 1."""
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    for block in range(first // rows, -(-last // rows)):
        yield block, (block * rows, min((block + 1) * rows, shape[0]))


def _draw(key: str, shape: Sequence[int], rule: Init) -> np.ndarray:
    """The block's numbers in fp32. Always the whole block: redrawn ones follow those drawn first."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    numbers = generator.standard_normal(math.prod(shape), dtype=np.float32)
    while math.isfinite(rule.cut) and len(beyond := np.flatnonzero(np.abs(numbers) > rule.cut)):
        numbers[beyond] = generator.standard_normal(len(beyond), dtype=np.float32)
    numbers *= np.float32(rule.std)
    numbers += np.float32(rule.mean)
    return numbers.reshape(shape)
