"""Fills a sharded model from weights on disk.

Each rank reads the regions of its own shards and nothing else, in blocks, several at a time: straight into
place where the dtype on disk is that of the shard and the memory is the host's, else by a block's buffer.
Where only rank 0 sees the files it reads block after block and broadcasts them, and each rank keeps what is
its own. Either way a rank needs its shards and some blocks.
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
from toolkit.distributed.dtensor import Filled, part_to_fill
from toolkit.errors import CheckpointError, DataError, first_few
from toolkit.launcher.environment import threads
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.weights.source import Stored, WeightSource

BLOCK_BYTES = 16 << 20
"""Size of a thread's block: small, so that many threads need little."""
_SHOWN = 8
# The shape is a run's to change, and elsewhere that of the config.json beside the weights.
_TIED = "model.tie_embeddings, or for a tool tie_word_embeddings in config.json,"
_VOCABULARY = "model.vocab_size, or for a tool vocab_size in config.json,"


@torch.no_grad()
def load_weights(
    source: WeightSource | None,
    tensors: Mapping[str, Tensor | Filled],
    *,
    broadcast_from_rank_0: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill ``tensors`` by name, in place, cast to their dtype; collective over ``group`` (default: all).

    ``tensors`` are this rank's: DTensors of any mesh, or plain ones; on which ranks a name is does not
    matter, as long as the ranks together ask for all that ``source`` has. ``source`` may be None on other
    ranks than 0 with ``broadcast_from_rank_0``; the group must then carry CPU tensors (gloo). Nothing is
    written before names and shapes have been compared on every rank.

    Raises:
        DataError: on every rank alike: tensors missing, too many or of other shapes, by name; or what was
            read is damaged.
    """
    ranks = Ranks(group)
    place, stored = ranks.on_rank_0(lambda: _contents(source))
    problems = ranks.gather_problems(_misfits(stored, tensors, ranks))
    if problems:
        raise DataError("\n  ".join([f"the weights in {place} do not fit this model:", *problems]))
    parts = {name: part_to_fill(tensor) for name, tensor in tensors.items()}
    if broadcast_from_rank_0 and ranks.size > 1:
        failures = _broadcast(source, stored, parts, ranks)
    else:
        assert source is not None
        failures = ranks.gather_problems(_read(source, parts))
    if failures:
        raise DataError("\n  ".join(failures))


def open_alike(
    open_weights: Callable[[], WeightSource],
    *,
    on_rank_0_alone: bool = False,
    group: dist.ProcessGroup | None = None,
) -> WeightSource | None:
    """Open the same weights on every rank by ``open_weights``, or on rank 0 alone: None on the others.

    Raises:
        DataError: it failed on some rank, or the ranks do not see the same; alike on every rank.
    """
    ranks = Ranks(group)
    source, failure = None, []
    if ranks.rank == 0 or not on_rank_0_alone:
        try:
            source = open_weights()
        except (DataError, CheckpointError) as error:
            failure = [str(error)]
    failures = ranks.gather_problems(failure)
    if not failures and not on_rank_0_alone:
        place, stored = ranks.on_rank_0(lambda: _contents(source))
        same = source is not None and dict(source.tensors) == stored
        failures = ranks.gather_problems(
            [] if same else [f"{place} is not the same on rank {ranks.rank} as on rank 0"]
        )
    if failures:
        raise DataError("\n".join(failures))
    return source


def _contents(source: WeightSource | None) -> tuple[str, dict[str, Stored]]:
    assert source is not None
    return str(source.place), dict(source.tensors)


def _misfits(stored: Mapping[str, Stored], tensors: Mapping[str, Tensor | Filled], ranks: Ranks) -> list[str]:
    """Differences in names and shapes between the weights and the tensors of this rank."""
    problems = []
    missing = [name for name in tensors if name not in stored]
    if missing:
        hint = f"; its head is the embedding's: set {_TIED} to true" if missing == [HEAD] else ""
        problems.append(f"not there: {first_few(missing, _SHOWN)}{hint}")
    shapes = {
        name: f"{name} {stored[name].shape} there, {tuple(tensor.shape)} here"
        for name, tensor in tensors.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    }
    if shapes:
        problems.append(f"of another shape: {first_few(list(shapes.values()), _SHOWN)}")
    if shapes.keys() and shapes.keys() <= {EMBEDDING, HEAD}:
        problems.append(f"fix:  give {_VOCABULARY} that of the weights, or convert them with --vocab-size")
    # Ranks of a pipeline each hold some of the names: what no rank asks for is too much.
    asked = ranks.any_of([name in tensors for name in stored])
    extra = [name for name, used in zip(stored, asked, strict=True) if not used]
    if extra:
        hint = f"; the head is one of its own: set {_TIED} to false" if extra == [HEAD] else ""
        problems.append(f"there, but not in this model: {first_few(extra, _SHOWN)}{hint}")
    return problems


Part = tuple[Tensor | Filled, tuple[int, ...]]
"""This rank's part of a tensor, and where it starts."""


def _read(source: WeightSource, parts: Mapping[str, Part]) -> list[str]:
    """Every rank its own; what has failed."""

    def one(name: str, part: Part, rows: slice) -> None:
        local, offset = part
        target = local[rows]
        region = _region(offset, rows, local.shape)
        if _takes_bytes(target, source.tensors[name].dtype):
            source.read(name, region, target)
        else:
            target.copy_(source.read(name, region))

    with ThreadPoolExecutor(threads()) as pool:
        running = [
            pool.submit(one, name, part, rows)
            for name, part in parts.items()
            for rows in _row_blocks(part[0].shape, source.tensors[name].dtype)
        ]
        try:
            for done in running:
                done.result()
        except (DataError, CheckpointError) as error:
            pool.shutdown(cancel_futures=True)
            return [str(error)]
    return []


def _takes_bytes(target: Tensor | Filled, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Say if what is read can go straight into place."""
    return isinstance(target, Tensor) and target.dtype == dtype and target.is_cpu and target.is_contiguous()


def _row_blocks(shape: Sequence[int], dtype: torch.dtype) -> Iterator[slice]:
    """Rows of a tensor in blocks of at most BLOCK_BYTES, or of one row that is larger."""
    step = max(1, BLOCK_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def _broadcast(
    source: WeightSource | None, stored: Mapping[str, Stored], parts: Mapping[str, Part], ranks: Ranks
) -> list[str]:
    """Rank 0 for all, block after block, each with a byte behind it that says whether it could be read."""
    failure: list[str] = []
    row_bytes = [math.prod(it.shape[1:]) * it.dtype.itemsize for it in stored.values()]
    message = torch.empty(max(BLOCK_BYTES, *row_bytes) + 1, dtype=torch.uint8)
    for name, whole in stored.items():
        for rows in _row_blocks(whole.shape, whole.dtype):
            region = _region((0,) * len(whole.shape), rows, whole.shape)
            shape = (rows.stop - rows.start, *whole.shape[1:])
            size = math.prod(shape) * whole.dtype.itemsize
            block = message[:size].view(whole.dtype).view(shape)
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
            if name in parts:
                _keep(parts[name], block, rows)
    return []


def _keep(part: Part, block: Tensor, rows: slice) -> None:
    """Copy to this rank's part what it has of a block of whole rows."""
    local, offset = part
    start, stop = max(rows.start, offset[0]), min(rows.stop, offset[0] + local.shape[0])
    if start < stop:
        mine = (slice(start - rows.start, stop - rows.start), *_region(offset, slice(0, 0), local.shape)[1:])
        local[start - offset[0] : stop - offset[0]].copy_(block[mine])


def _region(offset: Sequence[int], rows: slice, shape: Sequence[int]) -> tuple[slice, ...]:
    """Where ``rows`` of a part at ``offset`` lie in the whole tensor."""
    columns = zip(offset[1:], shape[1:], strict=True)
    return (
        slice(offset[0] + rows.start, offset[0] + rows.stop),
        *(slice(start, start + size) for start, size in columns),
    )
