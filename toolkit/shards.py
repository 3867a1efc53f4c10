"""Which part of a tensor this rank has."""

from __future__ import annotations

import os

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from toolkit.hardware import cores
from toolkit.launcher.environment import whole_number

BLOCKS_BYTES = 1 << 30
"""Memory for the blocks that threads have in flight, whatever the number of cores."""
_COPIES = 4  # of a block, at most: as it is read, cast, put in order, written


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, DTensor or plain, and where it starts in every dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tensor.to_local().detach(), tuple(offset)


def threads() -> int:
    """This process's share of the cores, to fill its parts with; torch's own thread count is 1 under
    torchrun."""
    processes = whole_number(os.environ, "LOCAL_WORLD_SIZE", 1, 1)
    return max(1, cores() // processes)


def block_threads(block_bytes: int) -> int:
    """Threads that may each have a block of so many bytes in flight, within ``BLOCKS_BYTES`` together."""
    return max(1, min(threads(), BLOCKS_BYTES // (_COPIES * block_bytes)))
