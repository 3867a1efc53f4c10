"""Time a layer of experts beside a dense feed-forward with as many active FLOPs, forward and backward on one
CPU thread, in turns.

    python -m benchmarks.expert_layer [--repeats 15] [--output benchmarks/results/expert_layer.md]

The layer is that of the model with experts of ``benchmarks.peers``; the router's choice is that of random
weights, which loads experts unevenly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.machine import describe
from benchmarks.peer_models import EXPERTS, Case
from toolkit.distributed.process_group import DTYPES
from toolkit.models.common.decoder import FeedForward
from toolkit.models.common.moe import MoE

[SHAPE] = EXPERTS
TOKENS = (256, 1024, 4096)


def step_of(layer: nn.Module, dtype: torch.dtype, tokens: int, dim: int) -> Callable[[], object]:
    """A forward and backward of ``layer``, with gradients of its input and weights."""
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    layer.to(dtype)
    x = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def step() -> object:
        out = layer(x)
        out = getattr(out, "hidden", out)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return step


def row(dtype: str, tokens: int, repeats: int) -> str:
    """Measure both in turns: a row of the table."""
    args = Case(SHAPE, 1, 1, dtype, 1, tokens).args
    assert args.moe is not None
    layers = {"dense": FeedForward(args.dim, args.moe.ffn_dim * args.moe.top_k), "experts": MoE(args)}
    steps = {name: step_of(layer, DTYPES[dtype], tokens, args.dim) for name, layer in layers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    pairs = zip(seconds["experts"], seconds["dense"], strict=True)
    ratio = statistics.median(experts / dense for experts, dense in pairs)
    dense, experts = (1e3 * statistics.median(seconds[name]) for name in ("dense", "experts"))
    return f"| {tokens:,} | {dtype} | {dense:.1f} | {experts:.1f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    moe = EXPERTS[SHAPE]
    lines = [
        "# A layer of experts",
        "",
        f"`python -m benchmarks.expert_layer --repeats {options.repeats}`: {moe.num_experts} experts of "
        f"width {moe.ffn_dim}, {moe.top_k} per token, beside a dense feed-forward of width "
        f"{moe.ffn_dim * moe.top_k}; model dim {Case(SHAPE, 1, 1, 'float32', 1, 1).args.dim}, forward and "
        f"backward on one thread, medians. {describe()}",
        "",
        "| tokens | dtype | dense, ms | experts, ms | times dense |",
        "|---|---|---|---|---|",
    ]
    for dtype in ("bfloat16", "float32"):
        for tokens in TOKENS:
            lines.append(row(dtype, tokens, options.repeats))
            print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
