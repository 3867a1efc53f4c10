"""Offload the inputs of checkpointed blocks to CPU memory between forward and backward.

A checkpointed block saves little besides its input, B · S · D elements. A separate stream copies it to pinned
host memory, overlapping computation, and copies it back when the backward of the next block begins. The
block's backward therefore does not wait, and the device stores one extra input. Masks and rotations, which
all blocks share, are not offloaded, nor are the operator outputs saved by selective checkpointing.

Shapes: B batch, S sequence, D model dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from toolkit.compat import ActivationWrapper, CheckpointWrapper, checkpointed


def apply_activation_offload(blocks: nn.ModuleDict, *, prefetch: bool = True) -> None:
    """Wrap the checkpointed blocks, in place."""
    previous: OffloadedInput | None = None
    for name, block in blocks.items():
        if isinstance(block, CheckpointWrapper) or getattr(block, "checkpointed", False):
            blocks[name] = previous = OffloadedInput(block, previous if prefetch else None)


class OffloadedInput(ActivationWrapper):
    """A block that saves its first argument on the host. ``previous`` is the preceding block, whose backward
    runs next."""

    def __init__(self, block: nn.Module, previous: OffloadedInput | None = None):
        super().__init__(block)
        self._previous = [previous] if previous else []  # a list, so that it is not registered as a submodule
        self._latest: ReferenceType[HostCopy] | None = None
        self.host_copy: type[HostCopy] = HostCopy  # replaced in the planner's fake steps

    def forward(self, h_BSD: Tensor, *others: Any) -> Tensor:
        identity = _identity(h_BSD)  # not the input itself: autograd keeps the closure alive until backward

        def pack(saved: Tensor) -> Tensor | HostCopy:
            return self._host_copy(saved) if _identity(saved) == identity else saved

        with saved_tensors_hooks(
            pack, lambda saved: saved.to_device() if isinstance(saved, HostCopy) else saved
        ):
            return checkpointed(self)(h_BSD, *others)

    def _host_copy(self, tensor: Tensor) -> HostCopy:
        copy = self.host_copy(tensor)
        self._latest = ref(copy)
        copy.previous = next((block._latest for block in self._previous), None)
        return copy


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key shared by all aliases of a tensor while it is alive, also on the meta device."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


class HostCopy:
    """A copy of a tensor in host memory, pinned and asynchronous if the tensor is on a GPU.

    Attributes:
        previous: the copy of the same forward's block whose backward comes next.
    """

    previous: ReferenceType[HostCopy] | None = None

    def __init__(self, tensor: Tensor):
        self.device = tensor.device
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.device_copy: Tensor | None = None
        if not tensor.is_cuda:
            self.host.copy_(tensor)
            return
        stream = _copy_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory must not be reused before the copy finishes

    def to_device(self) -> Tensor:
        """Return a copy on the device, make the current stream wait for it, and prefetch ``previous``."""
        self.fetch()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(_copy_stream(self.device))
        if previous := self.previous and self.previous():
            previous.fetch()
        tensor, self.device_copy = self.device_copy, None
        assert tensor is not None
        return tensor

    def fetch(self) -> None:
        """Start the copy to the device, unless it has started."""
        if self.device_copy is not None:
            return
        self.device_copy = torch.empty_like(self.host, device=self.device)
        if self.device.type != "cuda":
            self.device_copy.copy_(self.host)
            return
        stream = _copy_stream(self.device)
        # Queued work may still use the memory.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.device_copy.copy_(self.host, non_blocking=True)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
