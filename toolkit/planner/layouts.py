"""Enumerate the layouts of a search, as settings of a config.

Mesh degrees, micro-batch size, activation checkpointing, pipeline schedule and resharding vary; global batch
and sequence length are the config's. Some layouts are skipped, and counted by reason:

* tp stays within a node, because it communicates four times per block, without overlap;
* cp is minimal, because dp ranks do the same work with less communication: it grows only if the batch has
  fewer sequences than ranks, or if a sequence does not fit;
* degrees of expert parallelism are powers of two; tp splits experts if it does in the config;
* replicas consist of whole nodes, unless all of dp is replicas;
* GPipe and LoopedBFS are used only if there are too few micro-batches for 1F1B, which has the same bubble and
  less memory; zero-bubble schedules run without checkpointing, because they would recompute a block for each
  weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from toolkit.config import Config
from toolkit.config.schema import replaced
from toolkit.data.batch_size import batch_shape
from toolkit.errors import divisors
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, degrees

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = 16384
"""Tokens per micro-batch beyond which GEMMs get no faster and only activations grow."""
_SPLIT = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
_P = "parallelism."
_SCHEDULE = f"{_P}pipeline_parallel_schedule"
SIZES = (f"{_P}pipeline_parallel_microbatch_size", "training.local_batch_size")
"""Keys of the micro-batch size."""
_RESET: dict[str, Any] = {
    f"{_P}sharding_strategy": None,
    f"{_P}module_fqns_per_model_part": None,
    f"{_P}pipeline_parallel_schedule_csv": "",
}
"""Keys reset because they would override the layout."""


def fixed_batch(config: Config, world: int) -> Config:
    """Fix a global batch that depends on the mesh at the value of ``config`` on ``world`` ranks."""
    training = config.training
    if training.global_batch_size != -1:
        return config
    mesh = degrees(config.parallelism, world)
    total = training.local_batch_size * (mesh.dp if mesh else world)
    return with_settings(config, {"training.global_batch_size": total})


def samples(config: Config, layout: ParallelDims) -> tuple[int, int]:
    """Return the samples per micro-batch on a rank, and the rank's micro-batches per step."""
    batch = batch_shape(config.training, dp=layout.dp)
    assert batch, "the preflight checks that the batch divides"
    rows = config.parallelism.pipeline_parallel_microbatch_size if layout.pp > 1 else batch.local
    return rows, batch.total // layout.dp // rows


def layout_settings(
    config: Config,
    args: ModelArgs,
    mesh: ParallelDims,
    node: int,
    sharded: float,
    capacity: float,
    reject: Callable[[str, int], object],
) -> Iterator[dict[str, Any]]:
    """Yield the settings of all layouts of ``mesh``, which fixes everything but replicas, without
    checkpointing.

    ``sharded`` is the number of bytes sharded over dp_shard, each of whose ranks has ``capacity`` bytes.
    ``reject`` counts skipped layouts.
    """
    rows = config.training.global_batch_size // mesh.dp
    length = config.training.seq_len
    sizes = [it for it in _MICRO_BATCHES if rows % it == 0 and (it == 1 or it * length <= _TOKENS)]
    for replicate in divisors(mesh.dp):
        sharding = mesh.dp // replicate * mesh.cp
        if replicate not in (1, mesh.dp) and sharding * mesh.tp % node:
            reject("replicas", 1)
            continue
        if sharded / (mesh.dp // replicate) > capacity:
            reject("fit", 1)
            break
        degree = _RESET | {
            "training.global_batch_size": config.training.global_batch_size,
            f"{_P}tensor_parallel_degree": mesh.tp,
            f"{_P}context_parallel_degree": mesh.cp,
            f"{_P}pipeline_parallel_degree": mesh.pp,
            f"{_P}data_parallel_replicate_degree": replicate,
            f"{_P}data_parallel_shard_degree": mesh.dp // replicate,
        }
        reshards = ["default"] if sharding == 1 else ["default", "always" if mesh.pp > 1 else "never"]
        etp = mesh.tp if config.parallelism.expert_tensor_parallel_degree > 1 else 1
        for ep, reshard in product(expert_degrees(args, sharding * mesh.tp // etp), reshards):
            of_mesh = degree | {
                f"{_P}expert_parallel_degree": ep,
                f"{_P}expert_tensor_parallel_degree": etp,
                f"{_P}fsdp_reshard_after_forward": reshard,
            }
            for size in sizes:
                if mesh.pp == 1:
                    yield of_mesh | {"training.local_batch_size": size}
                    continue
                for schedule in _schedules(config, args, mesh.pp, rows // size, reject):
                    if reshard == "always" and schedule[_SCHEDULE] in _SPLIT:
                        continue  # these schedules need gathered parameters
                    yield of_mesh | schedule | {f"{_P}pipeline_parallel_microbatch_size": size}


def expert_degrees(args: ModelArgs, ranks: int) -> list[int]:
    """Return the degrees of expert parallelism to try on ``ranks`` of dp_shard × cp × tp."""
    if args.moe is None:
        return [1]
    largest = math.gcd(args.moe.num_experts, ranks)
    return [it for it in divisors(largest) if it.bit_count() == 1]


def _schedules(
    config: Config, args: ModelArgs, pp: int, micro_batches: int, reject: Callable[[str, int], object]
) -> Iterator[dict[str, Any]]:
    """Yield the settings of the schedules; interleaved ones with every possible number of stages per rank."""
    ends = config.parallelism.pipeline_parallel_first_stage_less_layers
    ends += config.parallelism.pipeline_parallel_last_stage_less_layers
    layers = args.n_layers + ends
    key = f"{_P}pipeline_parallel_layers_per_stage"
    few = micro_batches < pp
    if pp > layers:
        reject("stages", 1)
        return
    yield {_SCHEDULE: "GPipe" if few else "1F1B", key: None}
    if 2 * pp > layers:
        reject("stages", 1)
        return
    for each in (2, 4, 8):
        if layers % (pp * each) == 0 or each == 2:
            per_stage = None if each == 2 else layers // (pp * each)
            yield {_SCHEDULE: "Interleaved1F1B", key: per_stage}
    if few:
        yield {_SCHEDULE: "LoopedBFS", key: None}
    else:
        reject("forwards first", 2)
    for name in _SPLIT:
        yield {_SCHEDULE: name, key: None}


def checkpointing_settings(config: Config) -> list[dict[str, Any]]:
    """Return the modes of activation checkpointing to try, from least to most memory, with the config's
    stride."""
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    none: dict[str, Any] = {mode: "none"}
    if config.parallelism.pipeline_parallel_degree > 1 and (
        config.parallelism.pipeline_parallel_schedule in _SPLIT
    ):
        return [none]
    tried = [{mode: "full"}, {mode: "selective", option: "op"}, none]
    configured = config.activation_checkpoint
    if configured.mode == "selective" and configured.selective_ac_option != "op":
        place = 2 if configured.by_operator else 1
        tried.insert(place, {mode: "selective", option: configured.selective_ac_option})
    return tried


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """Return ``config`` with ``settings`` applied."""
    for key, value in settings.items():
        config = replaced(config, key.split("."), value)
    return config
