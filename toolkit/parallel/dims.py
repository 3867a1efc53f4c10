"""The sizes of a mesh: how the ranks of a world are divided. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.parallelism import Parallelism


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh dimensions, outermost first."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ways a global batch is split."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in DEGREES]
        shown = [f"{name} {size}" for name, size in sizes if size > 1]
        return " × ".join(shown) or "1 process"


DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}
"""Keys of the sizes, by the names of :class:`ParallelDims`."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of ``sharding_strategy``, in the order of their numbers from 1."""
_KEEPING = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
"""Those that keep gathered parameters until backward."""


def strategy(parallelism: Parallelism) -> str | None:
    """The sharding strategy by name, if one is asked for."""
    asked = parallelism.sharding_strategy
    return STRATEGIES[asked - 1] if isinstance(asked, int) else asked


def degrees(parallelism: Parallelism, world_size: int) -> ParallelDims | None:
    """The degrees that ``parallelism`` gives ``world_size`` ranks, or None where it does not fit.

    ``data_parallel_shard_degree`` −1 takes all ranks that the others leave. NO_SHARD makes each of
    these a replica.
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
    )


def reshard_after_forward(parallelism: Parallelism) -> str | int:
    """``fsdp_reshard_after_forward`` as the sharding strategy has it, or the pipeline where none is named:
    each of its micro-batches would gather again what the one before has freed.

    NO_SHARD frees what it has gathered as FULL_SHARD does: there is nothing to send, but a second copy
    of all parameters would live through the forward.
    """
    asked, name = parallelism.fsdp_reshard_after_forward, strategy(parallelism)
    if asked != "default":
        return asked
    keeps = parallelism.pipeline_parallel_degree > 1 if name is None else name in _KEEPING
    return "never" if keeps else "default"


def strategy_in_effect(parallelism: Parallelism, mesh: ParallelDims) -> str:
    """The name of the sharding strategy that the degrees and ``fsdp_reshard_after_forward`` make."""
    kept = reshard_after_forward(parallelism) == "never"
    if mesh.dp_replicate == 1:
        return "SHARD_GRAD_OP" if kept else "FULL_SHARD"
    if mesh.dp_shard * mesh.cp == 1:
        return "NO_SHARD"
    return "HYBRID_SHARD_ZERO2" if kept else "HYBRID_SHARD"


def takes_ring(parallelism: Parallelism, *, device: str, documents: bool) -> bool:
    """Say if keys and values go around a ring on a ``device`` ("cpu" or "cuda").

    They do where asked for, but not within ``documents`` on CUDA, whose flash kernel has no mask for them.
    There they are gathered.
    """
    asked = parallelism.context_parallel_rotate_method == "alltoall"
    return asked and parallelism.context_parallel_degree > 1 and not (documents and device == "cuda")
