"""Describe the work of a step as data: operations and collectives of each part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matmul", "attention", "other"]
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Element size in bytes."""


@dataclass(frozen=True)
class Operation:
    """``count`` equal operations, each with ``flops`` and ``bytes`` read and written."""

    kind: Kind
    flops: float
    bytes: float
    count: int


@dataclass(frozen=True)
class Collective:
    """``count`` equal collectives over ``dimension``, each on a full tensor of ``bytes``; if ``waits``,
    computation waits for them."""

    dimension: str
    operation: str
    bytes: float
    waits: bool
    count: int


@dataclass(frozen=True)
class Work:
    """Operations of a pass through a part of the model. ``fused`` are the bytes read and written by each
    chain of operations that a compiler fuses."""

    operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    fused: tuple[float, ...] = ()

    def flops(self, *kinds: Kind) -> float:
        """Return the FLOPs of these kinds of operations, by default of all."""
        return sum(it.flops * it.count for it in self.operations if not kinds or it.kind in kinds)


@dataclass(frozen=True)
class Sizes:
    """Parameters that FSDP gathers.

    Attributes:
        elements: gathered elements, sharded only by tensor and expert parallelism.
        gathered_bytes: size of ``elements`` in the dtype in which they are gathered.
        trained: number of ``elements`` that are trained.
    """

    elements: int
    gathered_bytes: int
    trained: int


@dataclass(frozen=True)
class ModuleCost(Sizes):
    """Parameters, and cost of one micro-batch, of the embedding, a block or the head.

    Attributes:
        experts: those of the parameters that expert parallelism shards.
        saved_bytes: activations saved for backward.
        forward_bytes, backward_bytes: peak temporary memory, excluding gathered parameters and gradients.
    """

    experts: Sizes
    forward: Work
    backward: Work
    recompute: Work
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    @property
    def others(self) -> Sizes:
        """Parameters without ``experts``."""
        of_experts = self.experts
        return Sizes(
            self.elements - of_experts.elements,
            self.gathered_bytes - of_experts.gathered_bytes,
            self.trained - of_experts.trained,
        )


@dataclass(frozen=True)
class Costs:
    """Costs of a model. ``first`` is the cost of the first block; ``update`` is the optimizer's work on
    ``updated`` elements."""

    embedding: ModuleCost
    first: ModuleCost
    block: ModuleCost
    head: ModuleCost
    update: Work
    updated: int
