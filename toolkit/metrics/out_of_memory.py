"""Advice for the user of a run that ran out of memory."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from toolkit.metrics.memory import GIB

_SAVINGS = (
    ("training.loss_chunk_tokens lower", "the logits of fewer tokens exist at a time"),
    ("training.local_batch_size lower", "with global_batch_size set, the run stays the same"),
    ('activation_checkpoint.selective_ac_option = "matmul"', "instead of mode none: recomputes no matmul"),
    (
        'activation_checkpoint.selective_ac_option = "op"',
        "recomputes activations that are cheap for their size",
    ),
    ('activation_checkpoint.mode = "full"', "saves one activation per block and recomputes the others"),
    ("parallelism.sharding_strategy = 1", "FULL_SHARD: no rank stores full parameters or gradients"),
    (
        "training.enable_cpu_offload",
        "parameters, gradients and optimizer state stay on the host, which is slower",
    ),
    ("more ranks", "each stores a smaller shard"),
)


def out_of_memory_advice(
    device: torch.device, step: int, error: BaseException, *, snapshots: Path | None = None
) -> str:
    """Return the message for an out-of-memory ``error`` in ``step`` (0: before the first step).

    ``snapshots`` is the folder of memory snapshots, if they are enabled.
    """
    requested = re.search(r"allocate ([\d.]+ \w+)", str(error))
    lines = [
        f"{f'step {step}' if step else 'before the first step'}: out of memory on {device}"
        + (f" while allocating {requested[1]}" if requested else "")
    ]
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
        lines.append(f"  peak allocated memory: {peak / GIB:.2f} GiB of {total / GIB:.2f}")
    lines.append("  to save memory, cheapest first:")
    width = max(len(option) for option, _ in _SAVINGS)
    lines += [f"    {option:<{width}}  {effect}" for option, effect in _SAVINGS]
    written = [] if snapshots is None else list(snapshots.glob("iteration_*_exit/*.pickle"))
    if written:
        newest = max(written, key=lambda path: path.stat().st_mtime)
        lines.append(f"  memory snapshot: {newest}; view it at https://pytorch.org/memory_viz")
    elif device.type == "cuda":
        lines.append("  to see the allocations: run again with --profiling.enable_memory_snapshot")
    return "\n".join(lines)
