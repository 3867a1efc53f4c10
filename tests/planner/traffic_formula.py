"""Bytes that a rank sends in one step, by formula, which what a fake step counts is compared with.

docs/parallelism.md has the formulas in words.

An exchange is a collective, or a transfer, of one kind in one group: the bytes of the whole tensor, added up
over a step. A whole tensor is what all ranks have together after an all-gather and before a reduce-scatter;
what each has in an all-reduce; what one gives to an all-to-all, or hands on in a transfer. Validation is no
part of a step.

A micro-batch goes through a stage in passes: forward "F", that of a reference "R", backward "B", or its
halves for inputs "I" and for weights "W"; a schedule may gather and free a stage between them ("UNSHARD",
"RESHARD").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.planner.gradient_flow import ATTENDED, READS, Flow, given, gradient_flow
from toolkit.build import build_model
from toolkit.compat import CheckpointWrapper, fsdp_param_group
from toolkit.config import Config
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.distributed.dtensor import clean_name
from toolkit.distributed.process_group import DTYPES
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.parallel.fsdp import in_end_order
from toolkit.parallel.mesh import Mesh, build_mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.pipeline_parallel import TIED, Pipeline
from toolkit.planner.memory import fake_world, gathered_dtype
from toolkit.planner.traffic import WORLD, Exchange

_SCALARS = 3 * 8 + 8 + 8  # tokens, what the mean is over and who wants to stop; the loss; the norm


@dataclass(frozen=True)
class StepWork:
    """This rank's work of a step: the ``passes`` of each of its models, in order, and the ``tokens`` of a
    micro-batch that it has, those of all ranks of its tp group. ``shards`` names the ranks of FSDP."""

    config: Config
    param_dtype: torch.dtype
    shards: str
    pipeline: bool
    passes: list[list[str]]
    tokens: int

    @property
    def size(self) -> int:
        """Bytes of a number that is computed with."""
        return self.param_dtype.itemsize

    @property
    def precise_size(self) -> int:
        """Bytes of a number where 16 bits would not do."""
        return torch.promote_types(self.param_dtype, torch.float32).itemsize

    def reductions(self, passes: Sequence[str]) -> int:
        """How often gradients are reduced in these passes."""
        return passes.count("F") if self.config.parallelism.fsdp_sync_each_batch and not self.pipeline else 1


def by_formula(
    config: Config, args: ModelArgs, layout: ParallelDims, rank: int, *, param_dtype: torch.dtype
) -> list[Exchange]:
    """The exchanges of ``rank`` in a step on CPUs."""
    with fake_world(rank, layout.world_size):
        device = torch.device("cpu")
        mesh = build_mesh(device, **asdict(layout))
        parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        batch = batch_shape(config.training, dp=layout.dp)
        assert batch
        return list(exchanges(parts, config, mesh, batch, param_dtype))


def exchanges(
    model_parts: ModelParts, config: Config, mesh: Mesh, batch: BatchShape, param_dtype: torch.dtype
) -> Iterator[Exchange]:
    """The exchanges of this rank in a step; without those among a single rank. The model may lie on the meta
    device, and the group be one that sends nothing."""
    work = _work(model_parts, config, mesh, batch, param_dtype)
    scalars = _SCALARS + 8 * len(model_parts.names)
    found = [Exchange(WORLD, "all_reduce", tuple(range(dist.get_world_size())), scalars)]
    for model, passes in zip(model_parts.models, work.passes, strict=True):
        for record, backward in _units(model, config.parallelism.fsdp_backward_prefetch).items():
            found += _of_unit(record, passes, work, backward=backward)
        if mesh.tp:
            found += _tensor(model, passes, work, _ranks(mesh.tp.get_group()))
        if mesh.cp:
            tp = mesh.tp.size() if mesh.tp else 1
            found += _context(model, passes, work, _ranks(mesh.cp.get_group()), tp)
    if isinstance(model_parts, Pipeline):
        found += _pipeline(model_parts, work)
    yield from (each for each in found if len(each.ranks) > 1 and each.bytes)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


# What is computed, in which order


def _work(
    model_parts: ModelParts, config: Config, mesh: Mesh, batch: BatchShape, param_dtype: torch.dtype
) -> StepWork:
    length = config.training.seq_len // (mesh.cp.size() if mesh.cp else 1)
    shards = "dp_shard × cp" if mesh.cp else "dp_shard"
    reference = ["R"] * (config.finetune.objective == "dpo")
    if not isinstance(model_parts, Pipeline):
        passes = [[*reference, "F", "B"] * batch.accumulation]
        return StepWork(config, param_dtype, shards, False, passes, batch.local * length)
    count = batch.local * batch.accumulation // model_parts.micro_batch
    schedule = model_parts.new_schedule(count, length)
    order = getattr(schedule, "pipeline_order_with_comms", None)
    if order:
        passes = [_of_stage(order[model_parts.rank], stage) for stage in model_parts.stages]
    else:
        stages_left = model_parts.last + 1 - model_parts.rank
        ahead = count if model_parts.schedule_name == "GPipe" else min(count, stages_left)
        passes = [["F"] * ahead + ["B", "F"] * (count - ahead) + ["B"] * ahead]
    passes = [reference * count + each for each in passes]
    return StepWork(config, param_dtype, shards, True, passes, model_parts.micro_batch * length)


def _of_stage(actions: Sequence[Any], stage: int) -> list[str]:
    found: list[str] = []
    for action in actions:
        if action.sub_actions:
            found += _of_stage(action.sub_actions, stage)
        elif action.stage_index == stage:
            found.append(action.computation_type.value)
    return found


# Where gradients are


def _flows(model: Decoder) -> dict[str, Flow]:
    """The flow of each block of ``model``, or of a stage of it, by the block's name. A stage behind the first
    is given hidden states with gradients, whatever is trained before."""
    has = model.tok_embeddings is None or _is_trained(model.tok_embeddings)
    found: dict[str, Flow] = {}
    for layer, block in model.layers.items():
        named = block.named_parameters()
        trained = {clean_name(name).rpartition(".")[0] for name, it in named if it.requires_grad}
        found[layer] = gradient_flow(trained, before=has)
        has = found[layer][""]
    return found


def _have_gradients(model: Decoder) -> dict[nn.Module, bool]:
    """Tell of each module of ``model``, wrappers among them, if its output has a gradient; the loss has."""
    found: dict[nn.Module, bool] = dict.fromkeys(model.modules(), True)
    if model.tok_embeddings is not None:
        found[model.tok_embeddings] = _is_trained(model.tok_embeddings)
    for layer, flow in _flows(model).items():
        for name, module in model.layers[layer].named_modules():
            found[module] = flow.get(clean_name(f"{name}.").removesuffix("."), True)
    return found


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


# FSDP


def _units(model: Decoder, prefetch: int) -> dict[Any, bool]:
    """FSDP's records of the units that have parameters, in the order in which their forwards end, and whether
    each is gathered in backward: its output has a gradient, or that of one of the ``prefetch`` units behind
    it, which asks for it. Modules that are gathered together share a record."""
    gradient = _have_gradients(model)
    units: dict[Any, bool] = {}
    for module in in_end_order([module for module in model.modules() if isinstance(module, FSDPModule)]):
        record = fsdp_param_group(module)
        if record is not None:
            units[record] = units.get(record, False) or gradient[module]
    asked = list(units.values())
    return {
        record: record.unshard_in_backward and any(asked[place : place + 1 + prefetch])
        for place, record in enumerate(units)
    }


def _of_unit(record: Any, passes: Sequence[str], work: StepWork, *, backward: bool) -> Iterator[Exchange]:
    info, fewer = record.mesh_info, record.post_forward_mesh_info
    shard = _ranks(info.shard_process_group)
    # Each rank's part of a parameter is padded to the largest.
    whole = len(shard) * sum(
        parameter.padded_sharded_param_size.numel()
        * gathered_dtype(parameter.sharded_param, work.param_dtype).itemsize
        for parameter in record.fsdp_params
    )
    wholly, partly = _gathers(record, passes, work, backward=backward)
    yield Exchange(work.shards, "all_gather", shard, wholly * whole)
    if partly:
        ranks = _ranks(fewer.shard_process_group)
        yield Exchange(work.shards, "all_gather", ranks, partly * whole)
    reduced = DTYPES[work.config.training.mixed_precision_reduce].itemsize
    trained = sum(
        parameter.padded_sharded_param_size.numel()
        for parameter in record.fsdp_params
        if parameter.sharded_param.requires_grad
    )
    times = work.reductions(passes)
    yield Exchange(work.shards, "reduce_scatter", shard, times * trained * len(shard) * reduced)
    if hasattr(info, "replicate_process_group"):
        replicas = _ranks(info.replicate_process_group)
        yield Exchange("dp_replicate", "all_reduce", replicas, trained * reduced)


def _gathers(record: Any, passes: Sequence[str], work: StepWork, *, backward: bool) -> tuple[int, int]:
    """How often the unit is gathered from all its ranks, and from the fewer that keep it after a forward; for
    ``backward`` too or not."""
    frees = record.post_forward_mesh_info is not None
    over_fewer = frees and record.post_forward_mesh_info is not record.mesh_info
    to_the_end = work.pipeline or reshard_after_forward(work.config.parallelism) == "never"
    held, wholly, partly = "shard", 0, 0
    for step in passes:
        asked = step in ("F", "R", "UNSHARD") or (backward and step in ("B", "I", "W"))
        if asked and held != "whole":
            wholly += held == "shard"
            partly += held == "part"
            held = "whole"
        if step in ("F", "R") and frees:
            held = "part" if over_fewer else "shard"
        if step == "RESHARD" or (step == "B" and not to_the_end):
            held = "shard"
    return wholly, partly


# Tensor, context and pipeline parallelism


def _again(model: Decoder, passes: Sequence[str], *, weights: int) -> int:
    """How often a part of ``model`` that is checkpointed is computed again. Where torch computes gradients of
    weights apart from those of inputs, it does one weight after the other, except in the first stage."""
    whole, inputs, apart = (passes.count(half) for half in ("B", "I", "W"))
    return whole + (apart if model.tok_embeddings is not None else inputs + apart * weights)


@dataclass(frozen=True)
class BlockWork:
    """How often a ``block`` is computed forward, backward and forward again, and which of its activations
    have gradients."""

    block: nn.Module
    flow: Flow
    forwards: int
    backwards: int
    again: int


def _blocks(model: Decoder, passes: Sequence[str], work: StepWork) -> Iterator[BlockWork]:
    """The blocks of ``model``. Compiled ones have no half of a backward: each runs the whole."""
    compiled, forwards = work.config.compile.blocks, passes.count("F")
    backwards = _again(model, passes, weights=1) if compiled else forwards
    for name, flow in _flows(model).items():
        block = model.layers[name]
        # Of weight and bias of a layer it finds the gradients together.
        named = (clean_name(name) for name, it in block.named_parameters() if it.requires_grad)
        trained = len({name.removesuffix(".weight").removesuffix(".bias") for name in named})
        checkpointed = any(isinstance(module, CheckpointWrapper) for module in block.modules())
        again = _again(model, passes, weights=1 if compiled else trained) * checkpointed * flow[""]
        yield BlockWork(block, flow, forwards + passes.count("R"), backwards, again)


def _tensor(
    model: Decoder, passes: Sequence[str], work: StepWork, ranks: tuple[int, ...]
) -> Iterator[Exchange]:
    config, batches, reductions = work.config, passes.count("F"), work.reductions(passes)
    references = passes.count("R")
    classifies = model.args.classifier is not None  # of pieces of the sequence: nothing is gathered
    blocks = list(_blocks(model, passes, work))
    gathered = scattered = 0
    # Attention and feed-forward: each gathers before it and scatters after it, and the other way in backward.
    for each in blocks:
        gathered += 2 * (each.forwards + each.again)
        gathered += each.backwards * (each.flow["attention"] + each.flow["feed_forward"])
        gathered += _gathered_again(model, passes, each, config)
        scattered += 2 * each.forwards + _scattered_again(each, config)
        scattered += each.backwards * (each.flow["attention_norm"] + each.flow["ffn_norm"])
    if model.tok_embeddings is not None:
        scattered += batches + references
        gathered += batches * _is_trained(model.tok_embeddings)
    if model.norm is not None and model.output is not None and not classifies:
        gathered += batches + references
        before = blocks[-1].flow[""] if blocks else model.tok_embeddings is None
        scattered += batches * (before or _is_trained(model.norm))
    hidden = work.tokens * model.args.dim * work.size
    yield Exchange("tp", "all_gather", ranks, gathered * hidden)
    yield Exchange("tp", "reduce_scatter", ranks, scattered * hidden)
    yield Exchange("tp", "all_reduce", ranks, sum(_row_lengths(each, references, work) for each in blocks))
    # Gradients of what every rank has whole, as norms, are shares until they are reduced, and accumulate so.
    each_batch = config.parallelism.fsdp_sync_each_batch or batches == 1
    size = (
        work.size
        if each_batch and not work.pipeline
        else DTYPES[config.training.mixed_precision_reduce].itemsize
    )
    whole = sum(it.numel() for it in model.parameters() if it.requires_grad and _is_whole(it))
    yield Exchange("tp", "all_reduce", ranks, reductions * whole * size)
    if model.output is not None and classifies:
        yield Exchange("tp", "all_reduce", ranks, batches * work.precise_size)
    elif model.output is not None:
        chunks = 0 < config.training.loss_chunk_tokens < work.tokens  # checkpointed as well
        again = _again(model, passes, weights=int(_is_trained(model.output))) if chunks else 0
        tokens = (batches + references + again) * work.tokens
        if config.parallelism.disable_loss_parallel or model.output.training_losses is not None:
            yield Exchange("tp", "all_gather", ranks, tokens * model.args.vocab_size * work.size)
        else:
            yield Exchange("tp", "all_reduce", ranks, tokens * 3 * work.precise_size)


def _gathered_again(model: Decoder, passes: Sequence[str], each: BlockWork, config: Config) -> int:
    """How often a block that is not checkpointed gathers for the gradients of weights what it gathered for
    their products. A split backward does so in both halves, though the first leaves it unread."""
    if each.again or not config.parallelism.tensor_parallel_recompute_allgather:
        return 0
    trained = {clean_name(name) for name, it in each.block.named_parameters() if it.requires_grad}
    readers = [name for name, read in READS.items() if read in (("attention_norm",), ("ffn_norm",))]
    halves = {name.partition(".")[0] for name in readers if trained & {f"{name}.weight", f"{name}.lora_a"}}
    return len(halves) * _again(model, passes, weights=1)


def _scattered_again(each: BlockWork, config: Config) -> int:
    """How often a block that is computed again scatters."""
    if config.activation_checkpoint.by_operator:
        return 0  # it has kept what it got
    once = config.activation_checkpoint.early_stop and not config.compile.blocks
    return each.again * (1 if once else 2)  # the second is the last thing that a block does


def _row_lengths(each: BlockWork, references: int, work: StepWork) -> int:
    """Bytes of the squares that DoRA adds up for the lengths of rows of which each rank has a part; in a
    reference it is switched off."""
    named = each.block.named_parameters()
    rows = sum(it.numel() for name, it in named if name.endswith(".magnitude") and _is_whole(it))
    return (each.forwards - references + each.again) * rows * work.precise_size


def _is_whole(parameter: nn.Parameter) -> bool:
    """Say if each rank of a tp group has all of ``parameter``, or of what FSDP leaves it."""
    assert isinstance(parameter, DTensor)
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[names.index("tp")].is_replicate()


def _context(
    model: Decoder, passes: Sequence[str], work: StepWork, ranks: tuple[int, ...], tp: int
) -> Iterator[Exchange]:
    blocks = list(_blocks(model, passes, work))
    forwards, again = sum(each.forwards for each in blocks), sum(each.again for each in blocks)
    own = work.tokens * 2 * model.args.n_kv_heads // tp * model.args.head_dim
    if work.config.parallelism.context_parallel_rotate_method == "alltoall":
        if work.config.compile.blocks and work.config.activation_checkpoint.by_operator:
            again = 0  # the compiler leaves out what gives only what is kept
        backwards = sum(each.backwards * given(each.flow, ATTENDED) for each in blocks)
        there = (forwards + backwards + again) * (len(ranks) - 1) * work.size
        yield Exchange("cp", "send", ranks, own * (there + backwards * len(ranks) * work.precise_size))
        return
    whole = own * len(ranks) * work.size
    if model.output is not None and "R" in passes:  # the sums of answers
        answers = work.config.training.seq_len + work.config.training.seq_len % 2
        rows = work.tokens * len(ranks) // work.config.training.seq_len
        yield Exchange("cp", "all_reduce", ranks, passes.count("F") * rows * answers * 8)
    yield Exchange("cp", "all_gather", ranks, (forwards + again) * whole)
    keys = ("attention.k_norm", "attention.wv")
    backwards = sum(each.backwards * any(each.flow[name] for name in keys) for each in blocks)
    yield Exchange("cp", "reduce_scatter", ranks, backwards * whole)


def _pipeline(model_parts: Pipeline, work: StepWork) -> Iterator[Exchange]:
    owner, rank, ranks = model_parts.owner, model_parts.rank, _ranks(model_parts.group)
    hidden = work.tokens // model_parts.tp * model_parts.args.dim * work.size
    for stage, passes in zip(model_parts.stages, work.passes, strict=True):
        away = sum(owner.get(neighbour, rank) != rank for neighbour in (stage - 1, stage + 1))
        onward = owner.get(stage + 1, rank) != rank
        yield Exchange("pp", "send", ranks, (passes.count("F") * away + passes.count("R") * onward) * hidden)
    ends = {owner[0], owner[model_parts.last]}
    if model_parts.args.tie_embeddings and len(ends) == 2 and rank in ends:
        tables = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        table = next(parameter for name, parameter in tables if name == TIED)
        assert isinstance(table, DTensor)
        yield Exchange("pp", "send", ranks, table.to_local().nbytes * table.requires_grad)
