"""Compile the forward of one token per row."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from toolkit import compat
from toolkit.generation.kv_cache import KVCache
from toolkit.models.common.decoder import Decoder

Step = Callable[..., Tensor]
"""Function from tokens (B, 1), their positions and :meth:`KVCache.step_inputs` to logits (B, 1, V);
everything that changes from token to token is an input."""
Compiler = Callable[[Step], Step]
"""Function that returns a step, compiled on its first call with new shapes."""

_FREEZING_OPTIONS = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""Inductor options for constant weights."""


def decode_step(model: Decoder) -> Step:
    """Build the forward of one token per row through the cache attached to ``model``."""

    def step(tokens_B1: Tensor, positions_B1: Tensor, *inputs: Tensor) -> Tensor:
        cache = getattr(next(iter(model.backends.values())), "cache", None)
        assert isinstance(cache, KVCache), "attached"
        cache.take(*inputs)
        return model(tokens_B1, positions=positions_B1)

    return step


def compiler_for(device: torch.device, *, constant: bool) -> Compiler:
    """Return a compiler based on inductor. On CUDA a step becomes one CUDA graph, without individual kernel
    launches.

    On a CPU, if weights are ``constant``, inductor stores a second copy of them in the layout of the fastest
    GEMM found by autotuning. This is oneDNN's or inductor's own (AMX tiles in bfloat16), which is faster than
    any torch operator (benchmarks/LOG.md).
    """
    if device.type == "cuda":
        return lambda step: torch.compile(step, mode="reduce-overhead", dynamic=False)
    return _compile_frozen if constant else lambda step: torch.compile(step, dynamic=False)


def _compile_frozen(step: Step) -> Step:
    compiled = torch.compile(step, dynamic=False)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", module="torch")  # raised by inductor

    def call(*inputs: Tensor) -> Tensor:
        # Set globally, because dynamo ignores options of torch.compile, but must know what is constant.
        with compat.inductor_config.patch(_FREEZING_OPTIONS):
            return compiled(*inputs)

    return call
