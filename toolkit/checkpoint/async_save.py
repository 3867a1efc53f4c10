"""Asynchronous checkpoints: training continues while a thread writes copies of the tensors.

The copies take as much host memory as the rank's share of the checkpoint. Copies are allocated at the first
save and reused; in pinned memory, torch rounds each tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.compat import dtensor_like
from toolkit.distributed.dtensor import local


class BackgroundWriter:
    """Runs one write at a time in a thread. ``pinned`` copies from a GPU into pinned memory, which is
    faster."""

    def __init__(self, *, pinned: bool = False):
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return CPU copies of the tensors, with the same sharding; valid until the next call."""
        shards = {name: local(tensor) for name, tensor in tensors.items()}
        self._copies = {name: self._buffer(name, shard) for name, shard in shards.items()}
        for name, shard in shards.items():
            self._copies[name].copy_(shard, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return {
            name: dtensor_like(self._copies[name], tensor)
            if isinstance(tensor, DTensor)
            else self._copies[name]
            for name, tensor in tensors.items()
        }

    def _buffer(self, name: str, shard: Tensor) -> Tensor:
        """Return the previous copy of this name, or a new buffer if the copy does not fit."""
        copy = self._copies.get(name)
        if copy is not None and (copy.shape, copy.dtype) == (shard.shape, shard.dtype):
            return copy
        pinned = self._pinned and shard.is_cuda
        return torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a daemon thread."""
        assert self._thread is None, "finish() was not called for the last write"
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # finish() raises it
            self._failure = error

    def finish(self, *, wait: bool) -> None:
        """Raise the error of the last write if it has ended; with ``wait``, block until it ends."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure:
            raise failure
