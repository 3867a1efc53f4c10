"""Parallel degrees and sharding strategies. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.parallelism import Parallelism


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh dimensions, outermost first. The experts of each layer are divided over ``ep``
    adjacent ranks of dp_shard × cp × tp. ``etp`` is 1 or tp. If it is tp, these are ranks of dp_shard × cp,
    and tp splits the width of each expert."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree: number of shards of a global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_fsdp(self) -> int:
        """Number of ranks over which FSDP shards experts under expert parallelism."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in (*DEGREES, "ep", "etp")]
        shown = [f"{name} {size}" for name, size in sizes if size > 1]
        return " × ".join(shown) or "1 process"


DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}
"""Config keys of the degrees whose product is the world size, by field of :class:`ParallelDims`."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of the values of ``sharding_strategy``, in the order of their numbers from 1."""
_KEEP_UNSHARDED = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
"""Strategies that keep parameters gathered between forward and backward."""


def strategy(parallelism: Parallelism) -> str | None:
    """Return the name of the configured sharding strategy, or None."""
    value = parallelism.sharding_strategy
    return STRATEGIES[value - 1] if isinstance(value, int) else value


def degrees(parallelism: Parallelism, world_size: int) -> ParallelDims | None:
    """Return the degrees of ``parallelism`` on ``world_size`` ranks, or None if they do not multiply to it.

    ``data_parallel_shard_degree`` −1 takes all remaining ranks. NO_SHARD makes each remaining rank a replica.
    """
    model = (
        parallelism.pipeline_parallel_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if strategy(parallelism) == "NO_SHARD":
        replicate, shard = world_size // model, 1
    elif shard == -1:
        shard = world_size // (model * replicate)
    if model * replicate * shard != world_size:
        return None
    return ParallelDims(
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree if parallelism.expert_parallel_degree > 1 else 1,
    )


def splits_experts(parallelism: Parallelism) -> bool:
    """Return whether tensor parallelism splits the width of experts."""
    return parallelism.expert_parallel_degree == 1 or parallelism.expert_tensor_parallel_degree > 1


def reshard_after_forward(parallelism: Parallelism) -> str | int:
    """Return ``fsdp_reshard_after_forward``, with "default" resolved by the sharding strategy.

    Without a strategy, a pipeline does not reshard, because each micro-batch would gather the parameters
    again. NO_SHARD reshards like FULL_SHARD: nothing is communicated, and otherwise a second copy of all
    parameters would stay allocated during the forward.
    """
    value, name = parallelism.fsdp_reshard_after_forward, strategy(parallelism)
    if value != "default":
        return value
    keeps = parallelism.pipeline_parallel_degree > 1 if name is None else name in _KEEP_UNSHARDED
    return "never" if keeps else "default"


def strategy_in_effect(parallelism: Parallelism, mesh: ParallelDims) -> str:
    """Return the sharding strategy equivalent to the degrees and ``fsdp_reshard_after_forward``."""
    kept = reshard_after_forward(parallelism) == "never"
    if mesh.dp_replicate == 1:
        return "SHARD_GRAD_OP" if kept else "FULL_SHARD"
    if mesh.dp_shard * mesh.cp == 1:
        return "NO_SHARD"
    return "HYBRID_SHARD_ZERO2" if kept else "HYBRID_SHARD"


def uses_ring(parallelism: Parallelism, *, device: str, documents: bool) -> bool:
    """Return whether context parallelism uses ring attention on a ``device`` ("cpu" or "cuda").

    On CUDA, ``documents`` require all-gathers instead, because the flash kernel supports no mask.
    """
    rotates = parallelism.context_parallel_rotate_method == "alltoall"
    return rotates and parallelism.context_parallel_degree > 1 and not (documents and device == "cuda")
