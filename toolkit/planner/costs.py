"""Measure the costs of the embedding, the blocks and the head: forward, backward and recomputation.

Costs are recorded in a fake step (:mod:`toolkit.planner.fake_step`) of a model with two blocks, on tp × cp
ranks and, for expert parallelism, as many of dp_shard as it needs. The first block is measured separately,
because there may be no trained parameter before it; in a model whose first blocks are dense, it represents
those. The costs for any depth, pipeline and data-parallel degree follow from these.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.config import Config
from toolkit.config.finetune import Finetune
from toolkit.config.parallelism import ActivationCheckpoint, Parallelism
from toolkit.config.training import Distillation, Model
from toolkit.errors import ConfigError, Problem
from toolkit.finetune.parameters import IN_ATTENTION, all_shapes, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, uses_ring
from toolkit.planner.operations import measure_costs
from toolkit.planner.work import Costs

if TYPE_CHECKING:
    import torch

_CACHE: dict[str, Costs] = {}


def costs(
    config: Config,
    args: ModelArgs,
    *,
    tp: int,
    cp: int,
    rows: int,
    checkpointed: bool,
    param_dtype: torch.dtype,
    ep: int = 1,
    etp: int = 1,
) -> Costs:
    """Return the costs of micro-batches of ``rows`` samples on a rank of ``tp`` × ``cp``, cached per case.
    Experts are divided over ``ep`` ranks, with equal loads, and their width over ``etp``.

    If ``checkpointed``, blocks are checkpointed as configured; embedding and head never are. Nothing is
    compiled, and attention is SDPA. Call this without a process group.

    Raises:
        ConfigError: only some of the blocks are trained.
    """
    config = config.model_copy(update={"distillation": Distillation()})  # a teacher is counted apart
    layout = ParallelDims(1, 1, ep // math.gcd(ep, tp * cp // etp), cp, tp, ep, etp)
    probe = _probe_config(config, layout, rows=rows, checkpointed=checkpointed)
    case = probe.model_dump_json(
        include={"model", "training", "parallelism", "activation_checkpoint", "finetune", "optimizer", "loss"}
    )
    two = few_blocks(args, 2)
    key = f"{param_dtype} {two} {case}"
    if key not in _CACHE:
        check_uniform_blocks(args, config.finetune)
        _CACHE[key] = measure_costs(probe, two, layout, param_dtype)
    return _CACHE[key]


def few_blocks(args: ModelArgs, n_layers: int, *, dense: int = 1) -> ModelArgs:
    """Return the model with ``n_layers`` blocks that represent all of its blocks; in a model with experts,
    all but the first ``dense`` blocks have experts."""
    moe = args.moe and replace(args.moe, first_dense=min(args.moe.first_dense, dense))
    return replace(args, n_layers=n_layers, moe=moe)


def is_dense(args: ModelArgs, module: str) -> bool:
    """Report whether ``module`` is a block without experts, in a model that begins with such a block."""
    if not args.moe or args.moe.has_experts(0) or not module.startswith("layers."):
        return False
    return not args.moe.has_experts(int(module.removeprefix("layers.")))


def check_uniform_blocks(args: ModelArgs, options: Finetune) -> None:
    """Check that two blocks represent all: the same parameters must be trained in every block with experts,
    and in every block without. LLaMA-Adapter is exempt because it is small.

    Raises:
        ConfigError: they differ; the message names the key.
    """
    kinds: dict[str, set[str]] = {str(layer): set() for layer in range(args.n_layers)}
    for name in trained_names(all_shapes(args, options), args, options):
        if name.startswith("layers.") and IN_ATTENTION not in name:
            _, layer, part = name.split(".", 2)
            kinds[layer].add(part)
    with_experts = {layer for layer in kinds if args.moe and args.moe.has_experts(int(layer))}
    for alike in (with_experts, kinds.keys() - with_experts):
        if len({frozenset(kinds[layer]) for layer in alike}) > 1:
            break
    else:
        return
    set_by = ("freeze_first_layers", "freeze_last_layers", "trainable", "frozen")
    key = next((it for it in set_by if getattr(options, it)), "lora.target_modules")
    value = options.lora.target_modules if key.startswith("lora") else getattr(options, key)
    rule = "trains only some blocks, but a step is estimated from two equal blocks"
    fix = "remove it for a forecast that trains all blocks, which overestimates memory and time"
    raise ConfigError(Problem(rule, fix, f"finetune.{key}", value))


def checkpointed_blocks(options: ActivationCheckpoint, blocks: int) -> range:
    """Return the indices of the checkpointed blocks among the ``blocks`` of a model or stage."""
    if options.mode == "none":
        return range(0)
    by_stride = options.mode == "selective" and not options.by_operator
    return range(0, blocks, int(options.selective_ac_option) if by_stride else 1)


def _probe_config(config: Config, layout: ParallelDims, *, rows: int, checkpointed: bool) -> Config:
    """Return a config of one micro-batch on ``layout`` whose modules cost as much as those of ``config``."""
    parallelism, checkpointing = config.parallelism, config.activation_checkpoint
    kept: dict[str, Any] = {
        name: getattr(parallelism, name)
        for name in (
            "tensor_parallel_recompute_allgather",
            "disable_loss_parallel",
            "context_parallel_load_balancer",
        )
    }
    ring = uses_ring(parallelism, device="cuda", documents=False) and layout.cp > 1
    mode = checkpointing.mode if checkpointed else "none"
    if mode == "memory_budget":  # chooses by the cost of recomputation, like "op"
        mode, option = "selective", "op"
    else:
        option = checkpointing.selective_ac_option if checkpointed and checkpointing.by_operator else "1"
    sizes = {"local_batch_size": rows, "global_batch_size": rows * layout.dp, "steps": 1}
    if mode != "none":  # only blocks are measured, and an unchunked head takes half the time
        sizes["loss_chunk_tokens"] = 0
    return config.model_copy(
        update={
            "model": Model(attention="sdpa"),
            "training": config.training.model_copy(update=sizes),
            "parallelism": Parallelism(
                tensor_parallel_degree=layout.tp,
                context_parallel_degree=layout.cp,
                expert_parallel_degree=layout.ep,
                expert_tensor_parallel_degree=layout.etp,
                context_parallel_rotate_method="alltoall" if ring else "allgather",
                **kept,
            ),
            "data": config.data.model_copy(update={"document_mask": False}),
            "activation_checkpoint": checkpointing.model_copy(
                update={"mode": mode, "selective_ac_option": option, "enable_activation_offloading": False}
            ),
        }
    )
