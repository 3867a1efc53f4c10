"""What a rank sends in one step, by formula; docs/parallelism.md has the formulas in words.

An exchange is a collective, or a transfer, of one kind in one group: the bytes of the whole tensor, added up
over a step. A whole tensor is what all ranks have together after an all-gather and before a reduce-scatter;
what each has in an all-reduce; what one hands on in a transfer. Validation is no part of a step.

Tensors: H hidden states of a micro-batch after context parallelism has cut it, (B, S, D); U numbers of an FSDP
unit as tensor parallelism leaves them, padded to equal shards. A micro-batch goes through a stage in passes:
forward "F", backward "B", or its halves for inputs "I" and for weights "W".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.config import Config
from toolkit.config.layout import BatchShape
from toolkit.models.llama.model import Llama
from toolkit.parallel.execution import Execution
from toolkit.parallel.fsdp import Sharding
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.pipeline import TIED, Pipeline

WORLD = "world"
_SCALARS = 2 * 8 + 8 + 8  # tokens and who wants to stop; the loss; the norm


@dataclass(frozen=True)
class Exchange:
    """``bytes`` of whole tensors in ``operation`` ("all_gather", "reduce_scatter", "all_reduce", "send") over
    the ``ranks`` of ``dimension``."""

    dimension: str
    operation: str
    ranks: tuple[int, ...]
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, if the collective goes around a ring."""
        size = len(self.ranks)
        turns = {"send": 1.0, "all_reduce": 2 * (size - 1) / size}
        return self.bytes * turns.get(self.operation, (size - 1) / size)


@dataclass(frozen=True)
class Work:
    """What a step asks of a rank: ``passes`` of each of its models, in order; the ``rows`` of a micro-batch
    and the ``tokens`` of one that this rank has."""

    passes: list[list[str]]
    rows: int
    tokens: int


def exchanges(
    execution: Execution, config: Config, mesh: Mesh, batch: BatchShape, how: Sharding
) -> Iterator[Exchange]:
    """The exchanges of this rank in a step; without those among a single rank. The model may lie on the meta
    device, and the group be one that sends nothing."""
    work = _work(execution, config, mesh, batch)
    found = [Exchange(WORLD, "all_reduce", tuple(range(dist.get_world_size())), _SCALARS)]
    for model, passes in zip(execution.models, work.passes, strict=True):
        for module in _fsdp_modules(model):
            found += _of_unit(module, passes, how, pipeline=mesh.pp is not None)
        if mesh.tp:
            found += _tensor(model, passes, work, config, how, _ranks(mesh.tp.get_group()), pipeline=mesh.pp is not None)
        if mesh.cp:
            found += _context(model, passes, work, config, how, _ranks(mesh.cp.get_group()), mesh)
    if isinstance(execution, Pipeline):
        found += _pipeline(execution, work, how)
    yield from (each for each in found if len(each.ranks) > 1 and each.bytes)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


# What is computed in which order


def _work(execution: Execution, config: Config, mesh: Mesh, batch: BatchShape) -> Work:
    length = config.training.seq_len // (mesh.cp.size() if mesh.cp else 1)
    if not isinstance(execution, Pipeline):
        return Work([["F", "B"] * batch.accumulation], batch.local, batch.local * length)
    rows = execution.micro_batch
    count = batch.local * batch.accumulation // rows
    schedule = execution.new_schedule(count, length)
    order = getattr(schedule, "pipeline_order_with_comms", None)
    if order:
        passes = [_of_stage(order[execution.rank], stage) for stage in execution.stages]
    else:
        warm = count if execution.schedule_name == "GPipe" else min(count, execution.last + 1 - execution.rank)
        passes = [["F"] * warm + ["B", "F"] * (count - warm) + ["B"] * warm]
    return Work(passes, rows, rows * length)


def _of_stage(actions: Sequence[Any], stage: int) -> list[str]:
    found: list[str] = []
    for action in actions:
        if action.sub_actions:
            found += _of_stage(action.sub_actions, stage)
        elif action.stage_index == stage:
            found.append(action.computation_type.value)
    return found


# FSDP


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """FSDP's record of each unit that has parameters."""
    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            record = module._get_fsdp_state()._fsdp_param_group
            if record is not None and record not in seen:
                seen.add(record)
                yield record


def _of_unit(record: Any, passes: Sequence[str], how: Sharding, *, pipeline: bool) -> Iterator[Exchange]:
    info = record.mesh_info
    shard = _ranks(info.shard_process_group)
    numbers = sum(each.padded_sharded_param_size.numel() for each in record.fsdp_params)
    whole = numbers * len(shard)
    gathers, partial = _gathers(record, passes, how, pipeline=pipeline)
    yield Exchange("dp_shard", "all_gather", shard, gathers * whole * how.param_dtype.itemsize)
    if partial:
        group = _ranks(record.post_forward_mesh_info.shard_process_group)
        yield Exchange("dp_shard", "all_gather", group, partial * whole * how.param_dtype.itemsize)
    reduced = _reductions(passes, how, pipeline=pipeline)
    yield Exchange("dp_shard", "reduce_scatter", shard, reduced * whole * how.reduce_dtype.itemsize)
    if hasattr(info, "replicate_process_group"):
        replicas = _ranks(info.replicate_process_group)
        yield Exchange("dp_replicate", "all_reduce", replicas, numbers * how.reduce_dtype.itemsize)


def _reductions(passes: Sequence[str], how: Sharding, *, pipeline: bool) -> int:
    """How often the gradients of a unit are reduced."""
    return passes.count("F") if how.sync_each_batch and not pipeline else 1


def _gathers(record: Any, passes: Sequence[str], how: Sharding, *, pipeline: bool) -> tuple[int, int]:
    """How often the unit is gathered from all its ranks, and from the fewer ones that keep it after a forward."""
    frees = record.post_forward_mesh_info is not None
    over_fewer = frees and record.post_forward_mesh_info is not record.mesh_info
    keeps_on = pipeline or how.reshard_after_forward == "never"  # until the end of the step
    held, wholly, partly = "shard", 0, 0
    for step in passes:
        asked = step in ("F", "UNSHARD") or (step in ("B", "I", "W") and record.unshard_in_backward)
        if asked and held != "whole":
            wholly += held == "shard"
            partly += held == "part"
            held = "whole"
        if step == "F" and frees:
            held = "part" if over_fewer else "shard"
        if step == "RESHARD" or (step == "B" and not keeps_on):
            held = "shard"
    return wholly, partly


# Tensor, context and pipeline parallelism


def _checkpointed(model: Llama) -> int:
    """Blocks whose forward backward runs again."""
    return sum(
        any(isinstance(module, CheckpointWrapper) for module in block.modules())
        for block in model.layers.values()
    )


def _tensor(
    model: Llama,
    passes: Sequence[str],
    work: Work,
    config: Config,
    how: Sharding,
    ranks: tuple[int, ...],
    *,
    pipeline: bool,
) -> Iterator[Exchange]:
    batches = passes.count("F")
    hidden = work.tokens * model.args.dim * how.param_dtype.itemsize
    blocks, again = len(model.layers), _checkpointed(model)
    # Forward and backward of a block each gather before attention and feed-forward, and scatter after them.
    gathers, scatters = 4 * blocks + 2 * again, 4 * blocks + 2 * again
    options = config.activation_checkpoint
    if options.mode == "selective" and options.selective_ac_option == "op":
        scatters -= 2 * again  # kept
    if model.tok_embeddings is not None:
        gathers, scatters = gathers + 1, scatters + 1
    norms = 2 * blocks
    if model.norm is not None:
        gathers, scatters, norms = gathers + 1, scatters + 1, norms + 1
        chunk = config.training.loss_chunk_tokens
        times = batches * (2 if 0 < chunk < work.tokens else 1)
        if config.parallelism.disable_loss_parallel:
            logits = work.tokens * model.args.vocab_size * how.param_dtype.itemsize
            yield Exchange("tp", "all_gather", ranks, times * logits)
        else:
            precise = torch.promote_types(how.param_dtype, torch.float32).itemsize
            yield Exchange("tp", "all_reduce", ranks, times * 3 * work.tokens * precise)
    yield Exchange("tp", "all_gather", ranks, batches * gathers * hidden)
    yield Exchange("tp", "reduce_scatter", ranks, batches * scatters * hidden)
    # Gradients of norms are shares until they are reduced, and accumulate as such.
    reduced = _reductions(passes, how, pipeline=pipeline)
    dtype = how.param_dtype if reduced == batches else how.reduce_dtype
    yield Exchange("tp", "all_reduce", ranks, reduced * norms * model.args.dim * dtype.itemsize)


def _context(
    model: Llama,
    passes: Sequence[str],
    work: Work,
    config: Config,
    how: Sharding,
    ranks: tuple[int, ...],
    mesh: Mesh,
) -> Iterator[Exchange]:
    batches, blocks, again = passes.count("F"), len(model.layers), _checkpointed(model)
    heads = model.args.n_kv_heads // (mesh.tp.size() if mesh.tp else 1)
    numbers = work.tokens * 2 * heads * model.args.head_dim
    own, precise = how.param_dtype.itemsize, torch.promote_types(how.param_dtype, torch.float32).itemsize
    if config.parallelism.context_parallel_rotate_method == "alltoall":
        turns = len(ranks) - 1
        there = (2 * blocks + again) * turns * own
        back = blocks * len(ranks) * precise
        yield Exchange("cp", "send", ranks, batches * numbers * (there + back))
        return
    whole = batches * numbers * len(ranks) * own
    yield Exchange("cp", "all_gather", ranks, (blocks + again) * whole)
    yield Exchange("cp", "reduce_scatter", ranks, blocks * whole)


def _pipeline(execution: Pipeline, work: Work, how: Sharding) -> Iterator[Exchange]:
    ranks = _ranks(execution.group)
    hidden = work.tokens // execution.tp * execution.args.dim * how.param_dtype.itemsize
    for stage, passes in zip(execution.stages, work.passes, strict=True):
        neighbours = [execution.owner.get(stage + step, execution.rank) for step in (1, -1)]
        away = sum(owner != execution.rank for owner in neighbours)
        yield Exchange("pp", "send", ranks, passes.count("F") * away * hidden)
    ends = execution.owner[0], execution.owner[execution.last]
    if execution.args.tie_embeddings and execution.rank in ends and ends[0] != ends[1]:
        named = [*execution.named_parameters(), *execution.copies()]
        table = next(_local(parameter) for name, parameter in named if name == TIED)
        yield Exchange("pp", "send", ranks, table.nbytes)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
