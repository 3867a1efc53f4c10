"""Estimate the memory of a rank's step, fast enough for a search over thousands of layouts.

Combines the costs of a block, the embedding and the head (:mod:`toolkit.planner.costs`) with the numbers of
layers, stages, shards and micro-batches in flight. Fake steps verify the best layouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from toolkit.config import Config
from toolkit.config.parallelism import Parallelism
from toolkit.config.training import Distillation
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import parameter_count
from toolkit.models.teacher import teacher_args
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.parallel.pipeline_schedules import pipeline_stages
from toolkit.planner.costs import checkpointed_blocks, costs, few_blocks, is_dense
from toolkit.planner.layouts import samples
from toolkit.planner.pipeline import orders
from toolkit.planner.work import BYTES, Costs, Sizes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StateBytes:
    """Bytes of (parameters, gradients, optimizer state).

    Attributes:
        block, ends: per element of a block, and of the embedding and head.
        whole_block, whole_ends: of one unsharded block, and of the unsharded embedding and head.
    """

    block: tuple[float, ...]
    ends: tuple[float, ...]
    whole_block: tuple[int, ...]
    whole_ends: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """Bytes of the pipeline ``rank`` with the highest memory, by purpose."""

    rank: int
    parts: dict[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


def state_bytes(config: Config, args: ModelArgs, param_dtype: torch.dtype) -> StateBytes:
    """Measure the state of models with one and two blocks on one rank; works for any optimizer, adapter and
    dtype."""
    from toolkit.planner.memory import rank_state

    training = config.training.model_copy(
        update={"local_batch_size": 1, "global_batch_size": 1, "enable_cpu_offload": False}
    )
    changes = {"parallelism": Parallelism(), "training": training, "distillation": Distillation()}
    alone = config.model_copy(update=changes)
    one_rank = ParallelDims(1, 1, 1, 1, 1)
    measured = []
    for layers in (1, 2):
        state = rank_state(alone, few_blocks(args, layers, dense=0), one_rank, 0, param_dtype=param_dtype)
        elements = sum(math.prod(part.whole) for part in state.parts)
        measured.append((elements, (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes)))
    (one, sizes_1), (two, sizes_2) = measured
    block = two - one
    grown = tuple(after - before for before, after in zip(sizes_1, sizes_2, strict=True))
    rest = tuple(before - more for before, more in zip(sizes_1, grown, strict=True))
    of_block, of_ends = (
        tuple(size / elements for size in sizes) for sizes, elements in ((grown, block), (rest, one - block))
    )
    return StateBytes(of_block, of_ends, grown, rest)


def estimate(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    stored: StateBytes,
    param_dtype: torch.dtype,
    *,
    whole: bool = False,
    rank: int | None = None,
) -> Estimate:
    """Estimate the memory of a pipeline ``rank``, by default the one with the highest memory, to about 5%.

    The run must have passed the preflight. ``whole`` ignores cp's sharding of sequences, which gives an upper
    bound.
    """
    rows, _ = samples(config, layout)
    cp = 1 if whole else layout.cp
    plain, recomputed = (
        costs(
            config,
            args,
            tp=layout.tp,
            cp=cp,
            ep=layout.ep,
            etp=layout.etp,
            rows=rows,
            checkpointed=mode,
            param_dtype=param_dtype,
        )  # fmt: skip
        for mode in (False, config.activation_checkpoint.mode != "none")
    )
    teacher = teacher_bytes(config, layout, param_dtype) if config.distillation.enable else 0.0
    # The rank with the most micro-batches in flight, the one with the most blocks, and the one with the head.
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1} if rank is None else {rank}
    most = max(
        (
            _estimate_rank(config, args, layout, stored, plain, recomputed, each, param_dtype.itemsize)
            for each in ranks
        ),
        key=lambda it: it.bytes,
    )
    return replace(most, parts=most.parts | {"teacher": teacher}) if teacher else most


def teacher_bytes(config: Config, layout: ParallelDims, param_dtype: torch.dtype) -> float:
    """Return the bytes of a teacher's shard."""
    elements = parameter_count(teacher_args(config))
    return elements * param_dtype.itemsize / (layout.dp_shard * layout.cp * layout.tp * layout.pp)


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, rank: int, stages: int, micro_batches: int) -> int:
    """Return the peak number of forwards whose backward is pending on a pipeline ``rank``."""
    alive = most = 0
    for kind, _, _ in orders(schedule, pp, stages, micro_batches)[rank]:
        alive += (kind == "F") - (kind in ("B", "W"))
        most = max(most, alive)
    return most


def _estimate_rank(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    stored: StateBytes,
    plain: Costs,
    recomputed: Costs,
    rank: int,
    itemsize: int,
) -> Estimate:
    options, training = config.parallelism, config.training
    rows, micro_batches = samples(config, layout)
    if layout.pp > 1:
        stages = pipeline_stages(options, args.n_layers)
        module_names = [name for stage in stages.of_ranks[rank] for name in stages.modules[stage]]
        count, each = len(stages.modules), len(stages.of_ranks[rank])
        alive = in_flight(options.pipeline_parallel_schedule, layout.pp, rank, count, micro_batches) / each
        received = micro_batches * (
            2 * each - ("tok_embeddings" in module_names) - ("output" in module_names)
        )
    else:
        module_names = ["tok_embeddings", *(f"layers.{index}" for index in range(args.n_layers)), "output"]
        alive, received = 1.0, 0
    layers = [name for name in module_names if name.startswith("layers.")]
    checkpointed = checkpointed_blocks(config.activation_checkpoint, len(layers))
    blocks = []
    for index, name in enumerate(layers):
        side = recomputed if index in checkpointed else plain
        blocks.append(side.first if is_dense(args, name) else side.block)
    embedding, head = plain.embedding, plain.head
    if args.tie_embeddings and layout.pp > 1:  # the last stage has a copy
        table = {name: getattr(embedding, name) for name in ("elements", "trained", "gathered_bytes")}
        head = replace(head, **table)
    ends = [it for name, it in (("tok_embeddings", embedding), ("output", head)) if name in module_names]
    shards = layout.dp_shard * layout.cp
    parameters, gradients, state = (
        of_block * (sum(it.others.elements for it in blocks) / shards)
        + of_block * (sum(it.experts.elements for it in blocks) / layout.expert_fsdp)
        + of_ends * (sum(it.elements for it in ends) / shards)
        for of_block, of_ends in zip(stored.block, stored.ends, strict=True)
    )
    if training.enable_cpu_offload:
        parameters = gradients = state = 0.0
    saved_by_head = head.saved_bytes if head in ends else 0
    heads = alive if alive == micro_batches else 1.0  # else the last stage runs backward right after forward
    hidden = rows * training.seq_len * args.dim * itemsize / (layout.tp * layout.cp)
    saved = heads * saved_by_head + alive * (
        sum(it.saved_bytes for it in blocks)
        + (embedding.saved_bytes if embedding in ends else 0)
        + (hidden if layout.pp > 1 else 0)
    )
    if config.activation_checkpoint.enable_activation_offloading:  # all inputs except the current block's
        saved -= hidden * max(0, alive * len(checkpointed) - 1)
    without_head = saved - saved_by_head  # before the head's forward and after its backward
    block = recomputed.block if checkpointed else plain.block
    every = blocks + ends
    whole = layout.pp > 1 or (not options.fsdp_sync_each_batch and micro_batches > 1)
    stays_gathered = reshard_after_forward(options) == "never"
    root = float(embedding.gathered_bytes) if args.tie_embeddings and layout.pp == 1 else 0.0
    reduce_bytes = BYTES[training.mixed_precision_reduce]
    unreduced = float(reduce_bytes * sum(it.trained for it in every)) if whole else 0.0

    def reduced(trained: int, ranks: int = shards) -> float:
        return trained * (1 + 1 / ranks if ranks > 1 else 1.0)  # one rank's input is its output

    def moment(
        work: float,
        *,
        near: Sequence[Sizes] = (),
        summed: float = 0.0,
        activations: float = saved,
        end: float = 0.0,
    ) -> dict[str, float]:
        """Return the memory while ``near`` are gathered, gradients of ``summed`` elements are reduced, and
        the fraction ``end`` of all gradients is stored."""
        of_step = micro_batches > 1 and not whole
        early = config.optimizer.early_step_in_backward and layout.dp_replicate == 1
        gathered = sum(it.gathered_bytes for it in (every if stays_gathered else near))
        return {
            "parameters": parameters,
            "gradients": gradients * (1.0 if of_step else 0.0 if whole or early else end),
            "optimizer state": state,
            "activations": activations,
            "received": hidden * received,
            "gathered parameters": gathered if stays_gathered else gathered + root,
            "reductions": unreduced or reduce_bytes * summed,
            "work of backward": float(work),
        }

    before_head = partial(moment, activations=without_head)
    moments = [moment(embedding.backward_bytes, summed=reduced(embedding.trained), activations=0.0, end=1.0)]
    following = reduced(max(block.others.trained, head.trained if head in ends else 0))
    if block.experts.elements:  # a unit of its own, reduced before the rest of the block
        left = max(0, block.backward_bytes - itemsize * block.experts.trained)
        summed = reduced(block.experts.trained, layout.expert_fsdp)
        moments += [
            before_head(max(0, block.forward_bytes - block.saved_bytes), near=[block, block]),
            before_head(block.backward_bytes, near=[block, block.others], summed=following),
            before_head(left, near=[block.others], summed=summed),
        ]
    else:
        moments.append(before_head(block.backward_bytes, near=[block, block], summed=following))
    if blocks:  # the first block's backward, after those of all others
        near, kept = [block, block.others if block.experts.elements else block], blocks[0].saved_bytes
        end = 1 - 1 / len(blocks)
        moments.append(moment(block.backward_bytes, near=near, summed=following, activations=kept, end=end))
    if head in ends:
        moments.append(before_head(head.forward_bytes, near=[head, block]))
        moments.append(moment(head.backward_bytes, near=[head, block]))
        work = 0.0 if whole else head.gathered_bytes
        moments.append(before_head(work, near=[block], summed=reduced(head.trained)))
    return Estimate(rank, max(moments, key=lambda parts: sum(parts.values())))


def fake_peak(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    memory: Estimate,
    stored: StateBytes,
    param_dtype: torch.dtype,
) -> float:
    """Return the peak memory of a step on the rank of ``memory``, from a fake step. A deep model runs with
    few blocks, and the estimate for the others is added."""
    from toolkit.planner.fake_step import step_memory

    few, layers = _shallow(config, args.n_layers)
    less = few_blocks(args, layers)
    rank = memory.rank * (layout.world_size // layout.pp)
    step = step_memory(few, less, layout, rank, param_dtype=param_dtype, target="cuda")
    rest = memory.bytes - estimate(few, less, layout, stored, param_dtype, rank=memory.rank).bytes
    # With one micro-batch the peak may move from activations to gradients as blocks are added.
    return max(step.peak + rest, memory.bytes if samples(config, layout)[1] == 1 else 0.0)


def _shallow(config: Config, n_layers: int) -> tuple[Config, int]:
    """Return the config with few blocks per rank, and its number of layers."""
    options, checkpointing = config.parallelism, config.activation_checkpoint
    if options.pipeline_parallel_degree == 1:
        by_stride = checkpointing.mode == "selective" and not checkpointing.by_operator
        layers = 3 * (int(checkpointing.selective_ac_option) if by_stride else 1)
        return config, min(layers, n_layers)
    stages = len(pipeline_stages(options, n_layers).modules)
    ends = options.pipeline_parallel_first_stage_less_layers
    ends += options.pipeline_parallel_last_stage_less_layers
    if (layers := 2 * stages - ends) >= n_layers:
        return config, n_layers
    if options.pipeline_parallel_layers_per_stage is not None:
        options = options.model_copy(update={"pipeline_parallel_layers_per_stage": 2})
    return config.model_copy(update={"parallelism": options}), layers
