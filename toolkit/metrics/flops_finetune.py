"""Model FLOPs per token of a run that trains a part of its model, for MFU. Imports no torch."""

from __future__ import annotations

from toolkit.config.finetune import Finetune
from toolkit.finetune.parameters import IN_ATTENTION, all_shapes, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import EMBEDDING, INPUT, NORM, Row
from toolkit.models.parameters import head_parameters, table


def fine_tuning_flops(args: ModelArgs, options: Finetune, *, seq_len: int, causal: bool = False) -> float:
    """FLOPs of a step for one token: :func:`~toolkit.metrics.flops.flops_per_token` where all is trained.

    Of each parameter 2 forward, 2 for the gradient of what it multiplies, where that has one, and 2 for its
    own, where it is trained; an adapter's do not count. DPO has one more forward, of its reference.
    """
    rows, trained = table(args), trained_names(all_shapes(args, options), args, options)
    modules = {name.rpartition(".")[0] for name in trained}
    head = head_parameters(args)
    seen = min(seq_len, args.sliding_window or seq_len)
    square = 4 * args.n_heads * args.head_dim * seen
    square -= square * seen // (2 * seq_len) if causal else 0
    forward = sum(rows.block_sizes) * 2 + args.n_layers * square + 2 * (args.dim + head)

    backward, has = 0, EMBEDDING in trained
    for layer, block in enumerate(rows.blocks):
        here = f"layers.{layer}."
        # A prefix is among the keys; of a prompt's first block, whose attention is apart, this is too much.
        adapted = any(name.startswith(f"layers.{layer}{IN_ATTENTION}") for name in trained)
        out = f"{here}attention.wo"
        flow = _flow(block, here, modules | ({out} if adapted else set()), before=has)
        flow[out] |= adapted
        backward += 2 * square * flow[out]
        for row in block:
            backward += 2 * row.size * (flow[row.module] + (row.name in trained))
        has = has or adapted or any(row.module in modules for row in block)
    normed = has or NORM in trained
    own = any(name.startswith("output.") or (args.tie_embeddings and name == EMBEDDING) for name in trained)
    backward += 2 * args.dim * (has + (NORM in trained)) + 2 * head * (normed + own)
    return float(forward * (2 if options.objective == "dpo" else 1) + backward)


def _flow(block: list[Row], here: str, trained: set[str], *, before: bool) -> dict[str, bool]:
    """Tell of each module of a block if what it reads has a gradient: ``before`` of the block's input, else
    where a module of ``trained`` stands on the way."""
    reads = {row.module: row.reads for row in block}

    def given(module: str) -> bool:
        names = reads[module]
        if names is None:  # all that stands before it
            earlier = list(reads)[: list(reads).index(module)]
            return before or any(name in trained for name in earlier)
        return any(before if name == INPUT else has(f"{here}{name}") for name in names)

    def has(module: str) -> bool:
        return module in trained or given(module)

    return {module: given(module) for module in reads}
