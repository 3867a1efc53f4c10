"""The costs of the pieces of a model: embedding, blocks and head, each forward, backward and forward again.

They are noted in a fake step (:mod:`toolkit.planner.fake_step`) of a model of two blocks, in a world of as
many ranks as tensor and context parallelism have. The first block is told apart from the others, before which
nothing may be trained. From these pieces follow the costs of any depth, pipeline and data-parallel degree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.config import Config
from toolkit.config.finetune import Finetune
from toolkit.config.parallelism import ActivationCheckpoint, Parallelism
from toolkit.config.training import Model
from toolkit.errors import ConfigError, Problem
from toolkit.finetune.parameters import IN_ATTENTION, all_shapes, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, uses_ring
from toolkit.planner.operations import found_costs
from toolkit.planner.work import Costs

if TYPE_CHECKING:
    import torch

_KNOWN: dict[str, Costs] = {}


def costs(
    config: Config,
    args: ModelArgs,
    *,
    tp: int,
    cp: int,
    rows: int,
    checkpointed: bool,
    param_dtype: torch.dtype,
) -> Costs:
    """The costs of micro-batches of ``rows`` samples, on a rank of ``tp`` × ``cp``, whose blocks are
    ``checkpointed`` as the config has it or not at all; take embedding and head from the latter. Found once
    for each case.

    Nothing is compiled, and attention is SDPA. Needs no process group, and must not be called where there is
    one.

    Raises:
        ConfigError: some blocks are trained and others not.
    """
    alike = _alike(config, args, tp=tp, cp=cp, rows=rows, checkpointed=checkpointed)
    case = alike.model_dump_json(
        include={"model", "training", "parallelism", "activation_checkpoint", "finetune", "optimizer", "loss"}
    )
    two = replace(args, n_layers=2)
    key = f"{param_dtype} {two} {case}"
    if key not in _KNOWN:
        refuse_unlike_blocks(args, config.finetune)
        _KNOWN[key] = found_costs(alike, two, ParallelDims(1, 1, 1, cp, tp), param_dtype)
    return _KNOWN[key]


def refuse_unlike_blocks(args: ModelArgs, options: Finetune) -> None:
    """Refuse what is trained of some blocks and not of others: two of them would not stand for all. A
    LLaMA-Adapter, which is small, counts as one of all blocks.

    Raises:
        ConfigError: the message names the key.
    """
    kinds: dict[str, set[str]] = {str(layer): set() for layer in range(args.n_layers)}
    for name in trained_names(all_shapes(args, options), args, options):
        if name.startswith("layers.") and IN_ATTENTION not in name:
            _, layer, part = name.split(".", 2)
            kinds[layer].add(part)
    if all(trained == kinds["0"] for trained in kinds.values()):
        return
    set_by = ("freeze_first_layers", "freeze_last_layers", "trainable", "frozen")
    key = next((it for it in set_by if getattr(options, it)), "lora.target_modules")
    value = options.lora.target_modules if key.startswith("lora") else getattr(options, key)
    rule = "trains some blocks and others not, and a step is reckoned from two blocks that are alike"
    fix = "leave it out for a forecast in which all are trained, which takes more memory and time"
    raise ConfigError(Problem(rule, fix, f"finetune.{key}", value))


def checkpointed_blocks(options: ActivationCheckpoint, blocks: int) -> range:
    """The places of those of the ``blocks`` of a model, or of a stage, that are checkpointed."""
    if options.mode == "none":
        return range(0)
    by_stride = options.mode == "selective" and not options.by_operator
    return range(0, blocks, int(options.selective_ac_option) if by_stride else 1)


def _alike(config: Config, args: ModelArgs, *, tp: int, cp: int, rows: int, checkpointed: bool) -> Config:
    """The config of a run of one micro-batch whose pieces cost what those of ``config`` do."""
    parallelism, checkpointing = config.parallelism, config.activation_checkpoint
    kept: dict[str, Any] = {
        name: getattr(parallelism, name)
        for name in (
            "tensor_parallel_recompute_allgather",
            "disable_loss_parallel",
            "context_parallel_load_balancer",
        )
    }
    ring = uses_ring(parallelism, device="cuda", documents=False) and cp > 1
    mode = checkpointing.mode if checkpointed else "none"
    if mode == "memory_budget":  # which chooses by what its recomputation costs, as "op" does
        mode, option = "selective", "op"
    else:
        option = "op" if checkpointed and checkpointing.by_operator else "1"
    sizes = {"local_batch_size": rows, "global_batch_size": rows, "steps": 1}
    if mode != "none":  # only the blocks are asked for, and a head without chunks takes half of the time
        sizes["loss_chunk_tokens"] = 0
    return config.model_copy(
        update={
            "model": Model(attention="sdpa"),
            "training": config.training.model_copy(update=sizes),
            "parallelism": Parallelism(
                tensor_parallel_degree=tp,
                context_parallel_degree=cp,
                context_parallel_rotate_method="alltoall" if ring else "allgather",
                **kept,
            ),
            "data": config.data.model_copy(update={"document_mask": False}),
            "activation_checkpoint": checkpointing.model_copy(
                update={
                    "mode": mode,
                    "selective_ac_option": option,
                    "enable_activation_offloading": False,
                }
            ),
        }
    )
