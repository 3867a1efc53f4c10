"""Load weights from disk into a sharded model.

Each rank reads only the regions of its shards, in blocks, several in parallel. Blocks are read directly into
the shard if it is on the host and in the dtype on disk, otherwise through a buffer. If only rank 0 has the
files, it reads and broadcasts block by block, and each rank copies the parts that overlap its shards. In both
cases, peak memory is a rank's shards plus a few blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import Fillable, fillable_shard
from toolkit.errors import CheckpointError, DataError, first_few
from toolkit.launcher.environment import threads
from toolkit.models.common.parameter_table import EMBEDDING, HEAD
from toolkit.weights.source import StoredTensor, WeightSource

BLOCK_BYTES = 16 << 20
"""Size of a thread's block, small so that many threads need little memory."""
_SHOWN = 8  # maximum number of names in a message
# A run sets model args in its config; tools read them from the config.json next to the weights.
_TIED = "model.tie_embeddings, or for a tool tie_word_embeddings in config.json,"
_VOCABULARY = "model.vocab_size, or for a tool vocab_size in config.json,"


@torch.no_grad()
def load_weights(
    source: WeightSource | None,
    tensors: Mapping[str, Tensor | Fillable],
    *,
    broadcast_from_rank_0: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load ``tensors`` by name, in place, cast to their dtype; collective over ``group`` (default: all).

    ``tensors`` are this rank's tensors or DTensors, of any mesh. Together the ranks must have all tensors of
    ``source``. With ``broadcast_from_rank_0``, ``source`` may be None on other ranks, and the group must
    support CPU tensors (gloo). Names and shapes are compared on every rank before anything is written.

    Raises:
        DataError: on every rank: tensors are missing, unexpected or of other shapes, reported by name; or the
            source is damaged.
    """
    ranks = Ranks(group)
    place, stored = ranks.on_rank_0(lambda: _contents(source))
    problems = ranks.gather_problems(_mismatches(stored, tensors, ranks))
    if problems:
        raise DataError("\n  ".join([f"the weights in {place} do not fit this model:", *problems]))
    shards = {name: fillable_shard(tensor) for name, tensor in tensors.items()}
    if broadcast_from_rank_0 and ranks.size > 1:
        failures = _broadcast(source, stored, shards, ranks)
    else:
        assert source is not None
        failures = ranks.gather_problems(_read(source, shards))
    if failures:
        raise DataError("\n  ".join(failures))


def open_on_all_ranks(
    open_weights: Callable[[], WeightSource],
    *,
    only_rank_0: bool = False,
    group: dist.ProcessGroup | None = None,
) -> WeightSource | None:
    """Open the same weights on every rank with ``open_weights``; with ``only_rank_0``, other ranks get None.

    Raises:
        DataError: on every rank: opening failed on some rank, or the ranks see different weights.
    """
    ranks = Ranks(group)
    source, failure = None, []
    if ranks.rank == 0 or not only_rank_0:
        try:
            source = open_weights()
        except (DataError, CheckpointError) as error:
            failure = [str(error)]
    failures = ranks.gather_problems(failure)
    if not failures and not only_rank_0:
        place, stored = ranks.on_rank_0(lambda: _contents(source))
        same = source is not None and dict(source.tensors) == stored
        failures = ranks.gather_problems(
            [] if same else [f"{place} differs between rank {ranks.rank} and rank 0"]
        )
    if failures:
        raise DataError("\n".join(failures))
    return source


def _contents(source: WeightSource | None) -> tuple[str, dict[str, StoredTensor]]:
    assert source is not None
    return str(source.place), dict(source.tensors)


def _mismatches(
    stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor | Fillable], ranks: Ranks
) -> list[str]:
    """List differences in names and shapes between the weights and this rank's tensors."""
    problems = []
    missing = [name for name in tensors if name not in stored]
    if missing:
        hint = f"; its head is tied to the embedding: set {_TIED} to true" if missing == [HEAD] else ""
        problems.append(f"missing in the weights: {first_few(missing, _SHOWN)}{hint}")
    shapes = {
        name: f"{name} {stored[name].shape} in the weights, {tuple(tensor.shape)} in the model"
        for name, tensor in tensors.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    }
    if shapes:
        problems.append(f"of another shape: {first_few(list(shapes.values()), _SHOWN)}")
    if shapes.keys() and shapes.keys() <= {EMBEDDING, HEAD}:
        problems.append(f"fix:  set {_VOCABULARY} to that of the weights, or convert them with --vocab-size")
    # Each rank of a pipeline has only some names; names that no rank has are unexpected.
    used_by_any = ranks.any_of([name in tensors for name in stored])
    extra = [name for name, used in zip(stored, used_by_any, strict=True) if not used]
    if extra:
        hint = f"; the head is not tied: set {_TIED} to false" if extra == [HEAD] else ""
        problems.append(f"in the weights, but not in this model: {first_few(extra, _SHOWN)}{hint}")
    return problems


LocalShard = tuple[Tensor | Fillable, tuple[int, ...]]
"""This rank's shard of a tensor, and its offset."""


def _read(source: WeightSource, shards: Mapping[str, LocalShard]) -> list[str]:
    """Read this rank's shards. Returns errors."""

    def read_block(name: str, shard: LocalShard, rows: slice) -> None:
        local, offset = shard
        target = local[rows]
        region = _region(offset, rows, local.shape)
        if _is_readable_into(target, source.tensors[name].dtype):
            source.read(name, region, target)
        else:
            target.copy_(source.read(name, region))

    with ThreadPoolExecutor(threads()) as pool:
        futures = [
            pool.submit(read_block, name, shard, rows)
            for name, shard in shards.items()
            for rows in _row_blocks(shard[0].shape, source.tensors[name].dtype)
        ]
        try:
            for future in futures:
                future.result()
        except (DataError, CheckpointError) as error:
            pool.shutdown(cancel_futures=True)
            return [str(error)]
    return []


def _is_readable_into(target: Tensor | Fillable, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Return whether bytes on disk can be read directly into ``target``."""
    return isinstance(target, Tensor) and target.dtype == dtype and target.is_cpu and target.is_contiguous()


def _row_blocks(shape: Sequence[int], dtype: torch.dtype) -> Iterator[slice]:
    """Yield the rows of a tensor in blocks of at most BLOCK_BYTES, or of one row if a row is larger."""
    step = max(1, BLOCK_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _broadcast(
    source: WeightSource | None,
    stored: Mapping[str, StoredTensor],
    shards: Mapping[str, LocalShard],
    ranks: Ranks,
) -> list[str]:
    """Broadcast block by block from rank 0; the byte after each block is 1 if the block could be read."""
    failure: list[str] = []
    row_bytes = [math.prod(it.shape[1:]) * it.dtype.itemsize for it in stored.values()]
    message = torch.empty(max(BLOCK_BYTES, *row_bytes) + 1, dtype=torch.uint8)
    for name, tensor in stored.items():
        for rows in _row_blocks(tensor.shape, tensor.dtype):
            region = _region((0,) * len(tensor.shape), rows, tensor.shape)
            shape = (rows.stop - rows.start, *tensor.shape[1:])
            size = math.prod(shape) * tensor.dtype.itemsize
            block = message[:size].view(tensor.dtype).view(shape)
            if ranks.rank == 0:
                assert source is not None
                message[size] = 1
                try:
                    source.read(name, region, block)
                except (DataError, CheckpointError) as error:
                    message[size], failure = 0, [str(error)]
            dist.broadcast(message[: size + 1], group=ranks.group, group_src=0)
            if not message[size]:
                return ranks.gather_problems(failure)
            if name in shards:
                _copy_overlap(shards[name], block, rows)
    return []


def _copy_overlap(shard: LocalShard, block: Tensor, rows: slice) -> None:
    """Copy the overlap between a block of full ``rows`` and this rank's shard."""
    local, offset = shard
    start, stop = max(rows.start, offset[0]), min(rows.stop, offset[0] + local.shape[0])
    if start < stop:
        columns = _region(offset, slice(0, 0), local.shape)[1:]
        overlap = (slice(start - rows.start, stop - rows.start), *columns)
        local[start - offset[0] : stop - offset[0]].copy_(block[overlap])


def _region(offset: Sequence[int], rows: slice, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the region of the full tensor that contains ``rows`` of a shard at ``offset``."""
    columns = zip(offset[1:], shape[1:], strict=True)
    return (
        slice(offset[0] + rows.start, offset[0] + rows.stop),
        *(slice(start, start + size) for start, size in columns),
    )
