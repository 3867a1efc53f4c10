"""Inputs of checkpointed blocks in CPU memory between forward and backward.

Of a checkpointed block little but its input stays, B · S · D elements. Here that goes to page-locked memory
of the host beside the computation, on a stream of its own. It comes back on the same stream when the backward
of the block after it begins, so that its own backward does not wait for the copy; the device then holds one
more input. Masks and rotations, which all blocks share, stay where they are; so do results that selective
checkpointing keeps by operator.

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
    """Wrap the blocks that are checkpointed, in place."""
    before: OffloadedInput | None = None
    for name, block in blocks.items():
        if isinstance(block, CheckpointWrapper):
            blocks[name] = before = OffloadedInput(block, before if prefetch else None)


class OffloadedInput(ActivationWrapper):
    """A block whose first argument, of what it saves for backward, is kept on the host. ``before`` is the
    block whose backward follows."""

    def __init__(self, block: nn.Module, before: OffloadedInput | None = None):
        super().__init__(block)
        self._before = [before] if before else []  # in a list, since it is no part of this module
        self._newest: ReferenceType[HostCopy] | None = None
        self.host_copy: type[HostCopy] = HostCopy  # replaced in fake steps

    def forward(self, h_BSD: Tensor, *others: Any) -> Tensor:
        place = _place(h_BSD)  # not the input itself: torch keeps the function until the backward

        def pack(saved: Tensor) -> Tensor | HostCopy:
            return self._host_copy(saved) if _place(saved) == place else saved

        with saved_tensors_hooks(pack, lambda saved: saved.back() if isinstance(saved, HostCopy) else saved):
            return checkpointed(self)(h_BSD, *others)

    def _host_copy(self, tensor: Tensor) -> HostCopy:
        copy = self.host_copy(tensor)
        self._newest = ref(copy)
        copy.before = next((block._newest for block in self._before), None)
        return copy


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The same for a tensor under another name, while it lives; a tensor without storage has one, too."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


class HostCopy:
    """A copy of a tensor in memory of the host, page-locked if it is on a GPU, whose stream does not wait.

    Attributes:
        before: the input, in the same forward, of the block whose backward follows.
    """

    before: ReferenceType[HostCopy] | None = None

    def __init__(self, tensor: Tensor):
        self.device = tensor.device
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.coming: Tensor | None = None
        if not tensor.is_cuda:
            self.host.copy_(tensor)
            return
        stream = _copying(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is given to another only when the copy is done

    def back(self) -> Tensor:
        """A copy on the device, for which what is queued there next waits; that of ``before`` is begun."""
        self.fetch()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(_copying(self.device))
        if before := self.before and self.before():
            before.fetch()
        came, self.coming = self.coming, None
        assert came is not None
        return came

    def fetch(self) -> None:
        """Begin to copy to the device, if that is not done."""
        if self.coming is not None:
            return
        self.coming = torch.empty_like(self.host, device=self.device)
        if self.device.type != "cuda":
            self.coming.copy_(self.host)
            return
        stream = _copying(self.device)
        # The memory may still be in use by what was queued before.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.coming.copy_(self.host, non_blocking=True)


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
