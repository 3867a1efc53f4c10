"""The layouts that a search looks at, as settings of a config.

The degrees of the mesh are varied, the micro-batch, activation checkpointing, a pipeline's schedule, and
whether parameters stay gathered. Global batch and length of a sample are the config's. Some layouts are left
out, and counted with the reason:

- tp divides a node, for it sends four times a block and is waited for;
- cp is as small as can be, for ranks of dp do the same work and send less: it grows where the batch has not a
  sequence for each rank, and where one sequence does not fit;
- replicas are of whole nodes, or there is nothing but replicas;
- GPipe and LoopedBFS stand in where a step has too few micro-batches for 1F1B, else they keep more and wait
  as long; zero-bubble schedules go with no checkpointing, whose blocks they would compute once a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from toolkit.config import Config
from toolkit.errors import divisors
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, degrees

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = 16384
"""Tokens of a micro-batch beyond which products are as fast as they get, and activations only grow."""
_SPLIT = ("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV")
_P = "parallelism."
_SCHEDULE = f"{_P}pipeline_parallel_schedule"
SIZES = (f"{_P}pipeline_parallel_microbatch_size", "training.local_batch_size")
"""Keys of the micro-batch."""
_UNSAID: dict[str, Any] = {
    f"{_P}sharding_strategy": None,
    f"{_P}module_fqns_per_model_part": None,
    f"{_P}pipeline_parallel_schedule_csv": "",
}
"""Keys that would say otherwise."""


def fixed_batch(config: Config, world: int) -> Config:
    """``config`` with the global batch that it has on ``world`` ranks, where it leaves that to the mesh."""
    training = config.training
    if training.global_batch_size != -1:
        return config
    mesh = degrees(config.parallelism, world)
    total = training.local_batch_size * (mesh.dp if mesh else world)
    return with_settings(config, {"training.global_batch_size": total})


def settings_of(
    config: Config,
    args: ModelArgs,
    mesh: ParallelDims,
    node: int,
    held: float,
    room: float,
    lose: Callable[[str, int], object],
) -> Iterator[dict[str, Any]]:
    """The settings of a layout but for checkpointing, where ``mesh`` says all but the replicas. ``held`` are
    the bytes that ranks of dp_shard divide, of which ``room`` is there; ``lose`` counts what is left out."""
    rows = config.training.global_batch_size // mesh.dp
    length = config.training.seq_len
    sizes = [it for it in _MICRO_BATCHES if rows % it == 0 and (it == 1 or it * length <= _TOKENS)]
    for replicate in divisors(mesh.dp):
        sharding = mesh.dp // replicate * mesh.cp
        if replicate not in (1, mesh.dp) and sharding * mesh.tp % node:
            lose("replicas", 1)
            continue
        if held / (mesh.dp // replicate) > room:
            lose("fit", 1)
            break
        degree = _UNSAID | {
            "training.global_batch_size": config.training.global_batch_size,
            f"{_P}tensor_parallel_degree": mesh.tp,
            f"{_P}context_parallel_degree": mesh.cp,
            f"{_P}pipeline_parallel_degree": mesh.pp,
            f"{_P}data_parallel_replicate_degree": replicate,
            f"{_P}data_parallel_shard_degree": mesh.dp // replicate,
        }
        reshards = ["default"] if sharding == 1 else ["default", "always" if mesh.pp > 1 else "never"]
        for reshard in reshards:
            of_mesh = degree | {f"{_P}fsdp_reshard_after_forward": reshard}
            for size in sizes:
                if mesh.pp == 1:
                    yield of_mesh | {"training.local_batch_size": size}
                    continue
                for schedule in _schedules(config, args, mesh.pp, rows // size, lose):
                    if reshard == "always" and schedule[_SCHEDULE] in _SPLIT:
                        continue  # which need what they have gathered
                    yield of_mesh | schedule | {f"{_P}pipeline_parallel_microbatch_size": size}


def _schedules(
    config: Config, args: ModelArgs, pp: int, micro_batches: int, lose: Callable[[str, int], object]
) -> Iterator[dict[str, Any]]:
    """Schedules by name, and those of several stages a rank with as many as there may be."""
    ends = config.parallelism.pipeline_parallel_first_stage_less_layers
    ends += config.parallelism.pipeline_parallel_last_stage_less_layers
    layers = args.n_layers + ends
    key = f"{_P}pipeline_parallel_layers_per_stage"
    few = micro_batches < pp
    if pp > layers:
        lose("stages", 1)
        return
    yield {_SCHEDULE: "GPipe" if few else "1F1B", key: None}
    if 2 * pp > layers:
        lose("stages", 1)
        return
    for each in (2, 4, 8):
        if layers % (pp * each) == 0 or each == 2:
            per_stage = None if each == 2 else layers // (pp * each)
            yield {_SCHEDULE: "Interleaved1F1B", key: per_stage}
    if few:
        yield {_SCHEDULE: "LoopedBFS", key: None}
    else:
        lose("forwards first", 2)
    for name in _SPLIT:
        yield {_SCHEDULE: name, key: None}


def checkpointing_of(config: Config) -> list[dict[str, Any]]:
    """The modes that are tried, from what keeps least, the config's own stride among them."""
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    none: dict[str, Any] = {mode: "none"}
    if config.parallelism.pipeline_parallel_degree > 1 and (
        config.parallelism.pipeline_parallel_schedule in _SPLIT
    ):
        return [none]
    tried = [{mode: "full"}, {mode: "selective", option: "op"}, none]
    own = config.activation_checkpoint
    if own.mode == "selective" and not own.by_operator:
        tried.insert(1, {mode: "selective", option: own.selective_ac_option})
    return tried


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """``config`` with other values, whose origin is the search."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, {})[name] = value
    changed = {table: config.value(table).model_copy(update=values) for table, values in tables.items()}
    return config.model_copy(update=changed)
