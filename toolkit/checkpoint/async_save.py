"""Lets training go on while a checkpoint is written: what is to be saved is copied, a thread does the rest.

The copies are the price: as many bytes of host memory as the rank's part of the checkpoint, made at the
first save and used again by each. Pinned, torch rounds each tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.compat import dtensor_like
from toolkit.distributed.dtensor import local


class Background:
    """One write at a time. ``pinned`` has a GPU copy into pages that stay in memory, which is faster."""

    def __init__(self, *, pinned: bool = False):
        self._pinned = pinned
        self._copies: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU, sharded as they are; valid until the next call."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        self._copies = {name: self._like(name, part) for name, part in parts.items()}
        for name, part in parts.items():
            self._copies[name].copy_(part, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return {
            name: dtensor_like(self._copies[name], tensor)
            if isinstance(tensor, DTensor)
            else self._copies[name]
            for name, tensor in tensors.items()
        }

    def _like(self, name: str, part: Tensor) -> Tensor:
        """The last copy of this name, or a new one where it does not fit."""
        copy = self._copies.get(name)
        if copy is not None and (copy.shape, copy.dtype) == (part.shape, part.dtype):
            return copy
        pinned = self._pinned and part.is_cuda
        return torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pinned)

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread of its own, which ends with the process."""
        assert self._thread is None, "the last write has not been ended"
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # for whoever ends the write
            self._failure = error

    def end(self, *, wait: bool) -> None:
        """Raise what the write that has ended failed with; ``wait`` until it has. Without one, nothing."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure:
            raise failure
