"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside of it."""

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
from toolkit.parallel import autograd_collectives


def use_cache(folder: Path) -> None:
    """Keep compiled code in ``folder``, unless TORCHINDUCTOR_CACHE_DIR names another.

    Call before anything is compiled. Entries are keyed by what they were compiled from and written by
    rename, so that ranks and runs may share a folder.
    """
    # torch sets the variable to its own default when torch._dynamo is imported, by whatever comes first.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def limit_recompilation() -> None:
    """Allow a function 64 graphs, by kind of block, shape of a batch, gradients and whether an adapter is on,
    and fail at the next one. Preferences with a validation pass torch's limit of 8, and so does FlexAttention
    at several lengths, which beyond it computes all S x S scores without a warning."""
    dynamo_config.recompile_limit = 64
    dynamo_config.fail_on_recompile_limit_hit = True


def keep_for_two_backwards(keep: bool) -> None:
    """Let a compiled backward leave its inputs whole, as it must where a schedule runs it a second time:
    for the gradients of inputs, and later for those of weights. Call before anything is compiled.
    """
    functorch_config.donated_buffer = not keep


def apply_compile(model: Decoder, options: Compile, async_tp: dist.ProcessGroup | None = None) -> None:
    """Compile in place, each block by itself, and the function that the head calls for a chunk of loss.

    Matmuls and the collectives of the group ``async_tp`` next to them run in pieces, alternately. Shapes are
    static: automatically dynamic ones could change kernels between a run and its resume.
    """
    _fuse_collectives(async_tp)
    # Other back ends than inductor take none, be it the default.
    mode: dict[str, Any] = {} if options.mode == "default" else {"mode": options.mode}
    compiled: Callable[[Any], Any] = partial(
        torch.compile, backend=options.backend, fullgraph=options.fullgraph, dynamic=False, **mode
    )
    if "model" in options.components:
        for block in model.layers.values():
            # Not the module, around which torch.compile puts another that zero-bubble schedules refuse.
            block.forward = compiled(block.forward)
    if "loss" in options.components and model.output is not None:
        model.output.loss = compiled(model.output.loss)
        if model.output.training_losses is not None:
            model.output.training_losses = compiled(model.output.training_losses)


def _fuse_collectives(group: dist.ProcessGroup | None) -> None:
    """Have inductor fuse matmuls with the collectives of ``group``; None is torch's default."""
    autograd_collectives.always_copy = group is not None
    fuse_collectives(group is not None)
    if group is None:
        return
    with warnings.catch_warnings():
        # torch 2.13 calls it deprecated, yet fuses nothing of a group for which it was not called.
        warnings.simplefilter("ignore", FutureWarning)
        compat.enable_symm_mem_for_group(group.group_name)


class CompileClock:
    """How long this process spends on compiling, from now on: backward graphs, which are compiled when
    first needed, and the reading of cached ones included."""

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
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
