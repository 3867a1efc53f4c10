"""Advice for a run that has ended for want of memory."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from toolkit.metrics.memory import GIB

_SAVINGS = (
    ("training.loss_chunk_tokens lower", "the logits of fewer tokens exist at a time"),
    ("training.local_batch_size lower", "with global_batch_size set, the run stays the same"),
    ('activation_checkpoint.selective_ac_option = "op"', "computes again what is cheap for its size"),
    ('activation_checkpoint.mode = "full"', "keeps one activation a block and computes the others again"),
    ("parallelism.sharding_strategy = 1", "FULL_SHARD: no rank keeps whole parameters or gradients"),
    ("training.enable_cpu_offload", "parameters, gradients and optimizer state live on the host, at a price"),
    ("more ranks", "each holds a smaller shard"),
)


def out_of_memory_advice(
    device: torch.device, step: int, error: BaseException, *, snapshots: Path | None = None
) -> str:
    """Advise a user whose run ended with ``error``, an out-of-memory error, in ``step`` (0: before).

    ``snapshots`` is the folder of memory snapshots, where they are on.
    """
    asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
    lines = [
        f"{f'step {step}' if step else 'before the first step'}: out of memory on {device}"
        + (f", {asked[1]} more were asked for" if asked else "")
    ]
    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
        lines.append(f"  tensors took at most {peak / GIB:.2f} GiB of {total / GIB:.2f}")
    lines.append("  what saves memory, the cheapest first:")
    width = max(len(switch) for switch, _ in _SAVINGS)
    lines += [f"    {switch:<{width}}  {why}" for switch, why in _SAVINGS]
    written = [] if snapshots is None else list(snapshots.glob("iteration_*_exit/*.pickle"))
    if written:
        newest = max(written, key=lambda path: path.stat().st_mtime)
        lines.append(f"  who held the memory: {newest}, for https://pytorch.org/memory_viz")
    elif device.type == "cuda":
        lines.append("  who held the memory: run again with --profiling.enable_memory_snapshot")
    return "\n".join(lines)
