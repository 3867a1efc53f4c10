"""torch.compile per block: all blocks share one graph, and FSDP's hooks stay outside it.

With expert parallelism, a block with experts is compiled in parts. Between them, rows are routed and sent
eagerly, because the host reads row counts and the experts' FSDP unit has its hooks within the block.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit import compat
from toolkit.compat import (
    compile_callbacks,
    default_cache_dir,
    dynamo_config,
    functorch_config,
    fuse_collectives,
)
from toolkit.config.parallelism import Compile
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import Compute
from toolkit.parallel import autograd_collectives
from toolkit.parallel.activation_checkpoint import parts_of


def set_cache_folder(folder: Path) -> None:
    """Store compiled code in ``folder``, unless TORCHINDUCTOR_CACHE_DIR is set.

    Call this before anything is compiled. Ranks and runs can share a folder, because entries are keyed by
    their source and written by rename.
    """
    # Importing torch._dynamo sets the variable to torch's default.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def limit_recompilation() -> None:
    """Allow 64 graphs per function (kinds of blocks, batch shapes, gradients, adapters), then raise an error.

    DPO with validation exceeds torch's limit of 8, as does FlexAttention at several lengths, which then
    silently computes all S x S scores.
    """
    dynamo_config.recompile_limit = 64
    dynamo_config.fail_on_recompile_limit_hit = True


def allow_split_backward(allow: bool) -> None:
    """Keep the inputs of compiled backwards, for schedules that run each backward twice: for input gradients,
    then for weight gradients. Call this before anything is compiled."""
    functorch_config.donated_buffer = not allow


def apply_compile(model: Decoder, options: Compile, async_tp: dist.ProcessGroup | None = None) -> None:
    """Compile each block, or its parts, and the head's chunked loss function, in place.

    Collectives of the group ``async_tp`` are decomposed and overlapped with adjacent matmuls. Shapes are
    static, because with automatic dynamic shapes a resumed run could use other kernels; only the number of
    rows sent to experts is dynamic.
    """
    _fuse_collectives(async_tp)
    # Only inductor accepts a mode; other backends reject even the default.
    mode: dict[str, Any] = {} if options.mode == "default" else {"mode": options.mode}
    compiled: Callable[..., Any] = partial(
        torch.compile, backend=options.backend, fullgraph=options.fullgraph, dynamic=False, **mode
    )
    # Not with CUDA graphs, of which there would be one per number of rows.
    for_any_size = partial(compiled, mode="default") if options.mode == "reduce-overhead" else compiled
    if "model" in options.components:
        for block in model.layers.values():
            # The module itself would get a wrapper, which zero-bubble schedules reject.
            if (parts := parts_of(block)) is None:
                block.forward = compiled(block.forward)
                continue
            parts.attend = compiled(parts.attend)
            if parts.moe.shared_experts is not None:
                parts.moe.shared_experts.forward = compiled(parts.moe.shared_experts.forward)
            compute = parts.moe.experts.compute
            parts.moe.experts.compute = partial(_compute, compute, for_any_size(compute))
    if "loss" in options.components and model.output is not None:
        model.output.loss = compiled(model.output.loss)
        if model.output.training_losses is not None:
            model.output.training_losses = compiled(model.output.training_losses)


def _compute(eager: Compute, compiled: Compute, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
    """Compute experts in one graph for any number of rows; torch compiles 0 and 1 as constants."""
    if len(rows_MD) < 2:
        return eager(rows_MD, counts_E)
    compat.mark_dynamic(rows_MD, 0)
    return compiled(rows_MD, counts_E)


def _fuse_collectives(group: dist.ProcessGroup | None) -> None:
    """Let inductor fuse matmuls with the collectives of ``group``; None restores torch's default."""
    autograd_collectives.always_copy = group is not None
    fuse_collectives(group is not None)
    if group is None:
        return
    with warnings.catch_warnings():
        # Deprecated in torch 2.13, but still required: without the call, no collective of the group is fused.
        warnings.simplefilter("ignore", FutureWarning)
        compat.enable_symm_mem_for_group(group.group_name)


class CompileClock:
    """Measures this process's compile time, including lazily compiled backward graphs and cache reads."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0
        compile_callbacks.on_compile_start(self._start)
        compile_callbacks.on_compile_end(self._end)

    def _start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Return the seconds spent compiling since the previous call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
