"""Fingerprints of tensors: 64 bits each that do not depend on how ranks shard them.

The fingerprint of a tensor is the sum, modulo 2^64, of a hash of each element's bits and its index in the
whole tensor. Therefore it is the same on any mesh, and changes with any single bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from toolkit.distributed.dtensor import shard_and_offset
from toolkit.metrics.jsonl import FINGERPRINTS, JsonLines
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.step_hooks import StepHook, StepResult

_CHUNK = 1 << 20
"""Number of elements hashed at a time."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# SplitMix64's increment and multipliers, as signed integers.
_INCREMENT, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Fingerprints(StepHook):
    """Writes fingerprints of gradients before clipping, and of weights and optimizer state after the update,
    to ``fingerprints.jsonl`` every ``every`` steps. The step calls :meth:`take_gradients`."""

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        resume_step: int,
        parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        buffers: Callable[[], Iterable[tuple[str, Tensor]]],
        optimizer: Optimizer,
    ):
        self.every, self._due = every, False
        self._parameters, self._buffers, self._optimizer = parameters, buffers, optimizer
        self._lines = (
            JsonLines(folder / FINGERPRINTS, resume_step=resume_step) if dist.get_rank() == 0 else None
        )
        self._gradients: dict[str, str] = {}

    def before_step(self, step: int) -> None:
        self._due = step % self.every == 0

    def take_gradients(self) -> None:
        """Compute the fingerprints of gradients, if they are due."""
        if self._due:
            self._gradients = fingerprints(
                (name, it.grad) for name, it in self._parameters() if it.grad is not None
            )

    def after_step(self, step: int, result: StepResult) -> None:
        if not self._due:
            return
        parameters = list(self._parameters())
        record: dict[str, Any] = {
            "step": step,
            "gradients": self._gradients,
            "weights": fingerprints([*parameters, *self._buffers()]),
            "optimizer": fingerprints(optimizer_tensors(parameters, self._optimizer).items()),
        }
        if self._lines is not None:
            self._lines.write(record)


@torch.no_grad()
def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the fingerprints of the tensors of all ranks, in hexadecimal; every rank calls this."""
    parts = {name: (_part(tensor), isinstance(tensor, DTensor)) for name, tensor in tensors}
    of_ranks: list[dict[str, tuple[int, bool]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, parts)
    sums: dict[str, int] = {}
    for rank in of_ranks:
        for name, (part, is_shard) in rank.items():
            if is_shard or name not in sums:  # plain tensors are whole on each rank
                sums[name] = sums.get(name, 0) + part
    return {name: f"{value % 2**64:016x}" for name, value in sums.items()}


def _part(tensor: Tensor) -> int:
    """Return this rank's part of the sum; among equal copies, only one counts."""
    if isinstance(tensor, DTensor):
        ranks = tensor.device_mesh.get_coordinate() or ()
        if any(it.is_replicate() and rank for it, rank in zip(tensor.placements, ranks, strict=True)):
            return 0
    shard, offset = shard_and_offset(tensor)
    return sum(_hashes(shard, tuple(offset), tuple(tensor.shape)))


def _hashes(shard: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[int]:
    if not shard.numel():
        return
    if not shard.ndim:
        shard, offset, shape = shard[None], (0,), (1,)
    rows = max(1, _CHUNK // max(1, shard[0].numel()))
    for start in range(0, len(shard), rows):
        part = shard[start : start + rows].contiguous()
        index = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            first = offset[dim] + (start if dim == 0 else 0)
            places = torch.arange(first, first + size, device=part.device)
            index = index[..., None] * shape[dim] + places
        bits = part.view(_INTEGERS[part.element_size()]).long()
        x = bits + (index + 1) * _INCREMENT
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        yield int((x ^ (x >> 31)).sum())
