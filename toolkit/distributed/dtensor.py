"""Parameters that torch shards and wraps: this rank's part, and the name without the wrappers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.compat import local_shape_and_offset, local_tensor

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(fqn: str) -> str:
    """`fqn` without the parts that activation checkpointing and torch.compile add to it."""
    for prefix in WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, DTensor or plain, outside of autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


class Filled(Protocol):
    """An object that is filled with numbers by rows, as a tensor is, and keeps them in a form of its own."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def is_meta(self) -> bool: ...

    def local_part(self) -> tuple[Filled, tuple[int, ...]]: ...

    def __getitem__(self, rows: slice) -> Filled: ...

    def copy_(self, numbers: Tensor) -> object: ...

    def fill_(self, value: float) -> object: ...


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, DTensor or plain, and where it starts in every dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = local_shape_and_offset(tensor.shape, mesh, placements)
    return tensor.to_local().detach(), tuple(offset)


def part_to_fill(tensor: Tensor | Filled) -> tuple[Tensor | Filled, tuple[int, ...]]:
    """This rank's part of what is to be filled, and where it starts in every dimension."""
    return local_part(tensor) if isinstance(tensor, Tensor) else tensor.local_part()
