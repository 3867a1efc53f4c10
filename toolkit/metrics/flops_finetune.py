"""Model FLOPs per token, for the MFU of a run that may train only part of a model. Imports no torch."""

from __future__ import annotations

from toolkit.config.finetune import Finetune
from toolkit.finetune.parameters import IN_ATTENTION, all_shapes, trained_names
from toolkit.metrics.flops import attention_flops, flops_per_token
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, INPUT, NORM, ParameterRow
from toolkit.models.parameters import head_parameters, table


def model_flops(args: ModelArgs, finetune: Finetune, *, seq_len: int, causal: bool = False) -> float:
    """Return the FLOPs per token of a training step: fewer than :func:`flops_per_token` if only a part is
    trained."""
    if not finetune.chooses and not finetune.extra_forwards:
        return flops_per_token(args, seq_len=seq_len, causal=causal)
    return fine_tuning_flops(args, finetune, seq_len=seq_len, causal=causal)


def fine_tuning_flops(args: ModelArgs, options: Finetune, *, seq_len: int, causal: bool = False) -> float:
    """Return the FLOPs per token of a step; equals :func:`~toolkit.metrics.flops.flops_per_token` if all is
    trained.

    Per parameter: 2 in forward, 2 for the gradient of its module's input if the input requires one, and 2 for
    its own gradient if it is trained. Adapter parameters do not count. DPO adds the forward pass of its
    reference model, unless that is stored; KTO adds those of mismatched answers.
    """
    rows, trained = table(args), trained_names(all_shapes(args, options), args, options)
    modules = {name.rpartition(".")[0] for name in trained}
    head = head_parameters(args)
    squares = [attention_flops(args, layer, seq_len, causal) for layer in range(args.n_layers)]
    forward = rows.active_in_blocks * 2 + sum(squares) + 2 * (args.dim + head)

    # flows: the input of the next block requires a gradient
    backward, flows = 0, rows[EMBEDDING].module in modules
    for layer, block in enumerate(rows.blocks):
        prefix = f"layers.{layer}."
        # Prompts join the keys. This overestimates the first block with prompts, which attends to them
        # separately.
        adapted = any(name.startswith(f"layers.{layer}{IN_ATTENTION}") for name in trained)
        output = f"{prefix}attention.wo"
        needed = _input_gradients(block, prefix, modules | ({output} if adapted else set()), before=flows)
        needed[output] |= adapted
        backward += 2 * squares[layer] * needed[output]
        for row in block:
            backward += 2 * row.active_size * (needed[row.module] + (row.name in trained))
        flows = flows or adapted or any(row.module in modules for row in block)
    head_input = flows or NORM in trained
    head_trained = any(
        name.startswith("output.") or (args.tie_embeddings and name.startswith("tok_embeddings."))
        for name in trained
    )
    backward += 2 * args.dim * (flows + (NORM in trained)) + 2 * head * (head_input + head_trained)
    return float(forward * (1 + options.extra_forwards) + backward)


def _input_gradients(
    block: list[ParameterRow], prefix: str, trained: set[str], *, before: bool
) -> dict[str, bool]:
    """Map each module of a block to whether its input requires a gradient. For the block's own input, this is
    ``before``; otherwise, it is whether a module in ``trained`` precedes the module."""
    reads = {row.module: row.reads for row in block}

    def input_requires_grad(module: str) -> bool:
        names = reads[module]
        if names is None:  # all modules before it
            earlier = list(reads)[: list(reads).index(module)]
            return before or any(name in trained for name in earlier)
        return any(before if name == INPUT else output_requires_grad(f"{prefix}{name}") for name in names)

    def output_requires_grad(module: str) -> bool:
        return module in trained or input_requires_grad(module)

    return {module: input_requires_grad(module) for module in reads}
