"""Model FLOPs per token of a run that trains a part of its model, for MFU. Imports no torch."""

from __future__ import annotations

import math

from toolkit.config.finetune import Finetune
from toolkit.finetune.parameters import all_shapes, trained_names
from toolkit.models.common.args import ModelArgs, head_parameters
from toolkit.models.common.gradient_flow import given, gradient_flow
from toolkit.models.common.parameters import parameter_shapes

_EMBEDDING = "tok_embeddings.weight"


def fine_tuning_flops(args: ModelArgs, options: Finetune, *, seq_len: int, causal: bool = False) -> float:
    """FLOPs of a step for one token: :func:`~toolkit.metrics.flops.flops_per_token` where all is trained.

    Of each parameter 2 forward, 2 for the gradient of what it multiplies, where that has one, and 2 for its
    own, where it is trained; an adapter's do not count. DPO has one more forward, of its reference.
    """
    shapes, trained = parameter_shapes(args), trained_names(all_shapes(args, options), args, options)
    first = "layers.0."
    block = {
        name.removeprefix(first): math.prod(shape) for name, shape in shapes.items() if name.startswith(first)
    }
    head = head_parameters(args)
    seen = min(seq_len, args.sliding_window or seq_len)
    square = 4 * args.n_heads * args.head_dim * seen
    square -= square * seen // (2 * seq_len) if causal else 0
    forward = args.n_layers * (2 * sum(block.values()) + square) + 2 * (args.dim + head)

    backward, has = 0, _EMBEDDING in trained
    for layer in range(args.n_layers):
        prefix = f"layers.{layer}."
        inside = {name.removeprefix(prefix).rpartition(".")[0] for name in trained if name.startswith(prefix)}
        flow = gradient_flow(inside, before=has)
        # A prefix is among the keys; of a prompt's first block, whose attention is apart, this is too much.
        backward += 2 * square * flow["attention.adapter"]
        for part, size in block.items():
            backward += 2 * size * (given(flow, part.rpartition(".")[0]) + (f"{prefix}{part}" in trained))
        has = flow[""]
    normed = has or "norm.weight" in trained
    own = any(name.startswith("output.") or (args.tie_embeddings and name == _EMBEDDING) for name in trained)
    backward += 2 * args.dim * (has + ("norm.weight" in trained)) + 2 * head * (normed + own)
    return float(forward * (2 if options.objective == "dpo" else 1) + backward)
