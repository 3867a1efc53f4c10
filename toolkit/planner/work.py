"""The work of a step, as data: operations and collectives of each part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matmul", "attention", "other"]
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number."""


@dataclass(frozen=True)
class Operation:
    """``count`` operations alike, each of ``flops`` and of ``bytes`` read and written."""

    kind: Kind
    flops: float
    bytes: float
    count: int


@dataclass(frozen=True)
class Collective:
    """``count`` exchanges alike over the ranks of ``dimension``, of ``bytes`` of the whole tensor each; with
    ``waits`` nothing is computed until it is done."""

    dimension: str
    operation: str
    bytes: float
    waits: bool
    count: int


@dataclass(frozen=True)
class Work:
    """Operations of a pass through a piece. ``fused`` are the bytes of each chain of operations that a
    compiler makes one of: those that come from before it, and what comes out of it."""

    operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    fused: tuple[float, ...] = ()

    def flops(self, *kinds: Kind) -> float:
        """FLOPs of these kinds, or of all."""
        return sum(it.flops * it.count for it in self.operations if not kinds or it.kind in kinds)


@dataclass(frozen=True)
class Piece:
    """A pass of one micro-batch through embedding, block or head.

    Attributes:
        numbers: parameters, of which tensor parallelism has left a part, once they are gathered.
        gathered_bytes: of them, in the dtype in which they are gathered.
        trained: how many of ``numbers`` are trained.
        saved_bytes: activations that stay from forward to backward.
        forward_bytes, backward_bytes: the most that lives beside what was there before, what is gathered,
            and gradients.
    """

    forward: Work
    backward: Work
    again: Work
    numbers: int
    gathered_bytes: int
    trained: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Costs:
    """``first`` is a model's first block. ``update`` is the work of the optimizer on ``updated`` numbers."""

    embedding: Piece
    first: Piece
    block: Piece
    head: Piece
    update: Work
    updated: int
