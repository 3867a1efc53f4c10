"""Inputs of checkpointed blocks in CPU memory between forward and backward.

Of a checkpointed block little but its input stays, B · S · D numbers. Here that goes to page-locked memory
of the host beside the computation, on a stream of its own, and comes back in front of the block's backward,
which waits for it. Masks and rotations, which all blocks share, stay where they are; so do results that
selective checkpointing keeps by operator.

Shapes: B batch, S sequence, D model dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, CheckpointWrapper


def apply_activation_offload(blocks: nn.ModuleDict) -> None:
    """Wrap the blocks that are checkpointed, in place."""
    for name, block in blocks.items():
        if isinstance(block, CheckpointWrapper):
            blocks[name] = OffloadedInput(block)


class OffloadedInput(ActivationWrapper):
    """A block whose first argument, of what it saves for backward, is kept on the host."""

    def forward(self, h_BSD: Tensor, *others: Any) -> Tensor:
        place = _place(h_BSD)  # not the input itself: torch keeps the function until the backward

        def pack(saved: Tensor) -> Tensor | HostCopy:
            return HostCopy(saved) if _place(saved) == place else saved

        with saved_tensors_hooks(pack, lambda saved: saved.back() if isinstance(saved, HostCopy) else saved):
            return self._checkpoint_wrapped_module(h_BSD, *others)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The same for a tensor under another name, while it lives; a tensor without numbers has one, too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


class HostCopy:
    """A tensor's numbers in memory of the host, page-locked if it is on a GPU, whose stream does not wait."""

    def __init__(self, tensor: Tensor):
        self.device = tensor.device
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            self.host.copy_(tensor)
            return
        stream = _copying(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is given to another only when the copy is done

    def back(self) -> Tensor:
        """A copy on the device, for which what is queued there next waits."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(_copying(self.device))
        return self.host.to(self.device, non_blocking=True, copy=True)


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
