"""Sharded and wrapped parameters: their local shards, and their names without wrappers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.compat import local_shape_and_offset, local_tensor

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(fqn: str) -> str:
    """Return ``fqn`` without the prefixes added by activation checkpointing and torch.compile."""
    for prefix in WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor or DTensor, detached from autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


class Fillable(Protocol):
    """An object that is filled by rows, like a tensor, but stores its values in another format."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def is_meta(self) -> bool: ...

    def shard_and_offset(self) -> tuple[Fillable, tuple[int, ...]]: ...

    def __getitem__(self, rows: slice) -> Fillable: ...

    def copy_(self, values: Tensor) -> object: ...

    def fill_(self, value: float) -> object: ...


def shard_and_offset(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of a tensor or DTensor, and its offset in every dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = local_shape_and_offset(tensor.shape, mesh, placements)
    return tensor.to_local().detach(), tuple(offset)


def fillable_shard(target: Tensor | Fillable) -> tuple[Tensor | Fillable, tuple[int, ...]]:
    """Return this rank's shard of a tensor or :class:`Fillable`, and its offset in every dimension."""
    return shard_and_offset(target) if isinstance(target, Tensor) else target.shard_and_offset()
