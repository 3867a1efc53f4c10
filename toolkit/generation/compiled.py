"""The forward of one token as compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from toolkit import compat
from toolkit.generation.kv_cache import KVCache
from toolkit.models.common.decoder import Decoder

Step = Callable[..., Tensor]
"""Logits (B, 1, V) of tokens (B, 1), their positions and what :meth:`KVCache.changing` gives, of which all
that changes from token to token is an input."""
Compiler = Callable[[Step], Step]
"""Gives a step that is compiled when it is called, for the shapes that it is called with."""

_FROZEN = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""Inductor's options for matrices that are constants."""


def step_of(model: Decoder) -> Step:
    """The forward of one token through the cache that is attached to ``model``."""

    def step(tokens_B1: Tensor, positions_B1: Tensor, *changing: Tensor) -> Tensor:
        cache = getattr(model.attention, "cache", None)
        assert isinstance(cache, KVCache), "attached"
        cache.take(*changing)
        return model(tokens_B1, positions=positions_B1)

    return step


def compiler_for(device: torch.device, *, constant: bool) -> Compiler:
    """Inductor. On CUDA a step is replayed as one graph, without the launches of its kernels.

    On a CPU, where weights are ``constant``, it keeps matrices once more, in the order of the product that
    was fastest when it was compiled: oneDNN's or one of inductor's own (tiles of AMX in bfloat16), which
    reads the matrices of a token at a rate that no operator of torch's reaches (benchmarks/LOG.md).
    """
    if device.type == "cuda":
        return lambda step: torch.compile(step, mode="reduce-overhead", dynamic=False)
    return _frozen if constant else lambda step: torch.compile(step, dynamic=False)


def _frozen(step: Step) -> Step:
    compiled = torch.compile(step, dynamic=False)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", module="torch")  # of inductor's own

    def call(*inputs: Tensor) -> Tensor:
        # Not as options of torch.compile, which dynamo does not see: it has to tell what is constant.
        with compat.inductor_config.patch(_FROZEN):
            return compiled(*inputs)

    return call
