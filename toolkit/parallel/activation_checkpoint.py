"""Activation checkpointing: keep little of a block's forward and compute the rest again in backward.

Mode "op" chooses by operator, by FLOPs per byte kept. Keeping an element of a matmul's result spares
2·K FLOPs, K being the inner dimension; keeping one of an attention's spares some 2·S, for a sequence of
S tokens; an element of a norm, a rotation or SwiGLU costs a handful. So attention is always kept and
whatever is elementwise never. Of the matmuls, those are kept whose result is no wider than what they
sum over (q, k, v, o, w2): in total 4.5 D a token where 4 queries share a key. Those that widen (w1, w3)
cost 7 D a token more at a width of 3.5 D, at the lowest FLOPs per byte of all matmuls, and are computed
again, which is 54% of a block's matmul FLOPs where mode "full" repeats them all, and attention. A
reduce-scatter is kept as well: it costs time and no FLOPs.

Under tensor parallelism the rule sees a rank's parts of the matrices: what w1 and w3 give becomes narrow
enough to keep, and wo and w2, which sum over less, are kept as what is scattered of them. What is gathered
never is: it is tp times as large as the part that it comes from. (Where no compiler leaves them out, wo and
w2 run once more for nothing; ``early_stop`` spares w2.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from toolkit.compat import CachedDispatchMode, checkpoint_wrapper, functorch_config, operator_is_compiled
from toolkit.config.parallelism import ActivationCheckpoint

KEPT = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "toolkit::blockwise_attention",
        "flex_attention",
        # What flex_attention is when it was compiled by itself, within a block that is not.
        "inductor_compiled_code",
        "_c10d_functional::reduce_scatter_tensor",
    }
)
"""Operators whose results mode "op" always keeps; by name, since some exist only once imported."""

_NF4_LINEAR = "toolkit::nf4_linear"
"""The matmul of a weight in 4 bits: rows of x and of the weight's (N, …) bytes."""
# Where a matmul has its second factor, (…, K, N).
_MATMULS = {"aten::mm": 1, "aten::bmm": 1, "aten::addmm": 2}
_MAY_KEEP = KEPT | {_NF4_LINEAR} | _MATMULS.keys()


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide if mode "op" keeps the result of ``operator``: the rule at the top of this file.

    torch.compile may override what is preferred, not what must be.
    """
    name = operator.name()
    keep = name in KEPT
    if name in _MATMULS:
        factor: Tensor = args[_MATMULS[name]]
        inner, width = factor.shape[-2:]
        keep = width <= inner
    elif name == _NF4_LINEAR:
        x, packed = args
        keep = len(packed) <= x.shape[-1]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _ComputeAgain(CachedDispatchMode):
    """Hand out what the forward has kept, of operators that :func:`policy` may keep.

    torch compares the number of all others with the forward's, too. They are not as many where a part of a
    block is an FSDP unit by itself: its hooks gather it in one of the two, and find it gathered in the other.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in _MAY_KEEP or operator_is_compiled(
            func, args, kwargs
        ):  # where all are kept, for a graph
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


def apply_activation_checkpoint(
    blocks: nn.ModuleDict, options: ActivationCheckpoint, *, pareto_folder: Path | None = None
) -> None:
    """Wrap the blocks in place. "memory_budget" wraps none: it is a setting of the compiler, which draws what
    each budget would cost into ``pareto_folder`` if that is asked for."""
    _set_memory_budget(options, pareto_folder if options.visualize_memory_budget_pareto else None)
    if options.mode in ("none", "memory_budget"):
        return
    arguments: dict[str, Any] = {
        "early_stop": options.early_stop,
        "preserve_rng_state": options.preserve_rng_state,
        "determinism_check": options.determinism_check,
        "debug": options.debug,
    }
    if options.by_operator:
        arguments["context_fn"] = _by_operator()
    by_stride = options.mode == "selective" and not options.by_operator
    stride = int(options.selective_ac_option) if by_stride else 1
    for index, name in enumerate(list(blocks)):
        if index % stride == 0:
            blocks[name] = checkpoint_wrapper(blocks[name], **arguments)


def _by_operator() -> Callable[[], Any]:
    # torch.compile warns of operators that work in place, of which a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    contexts: Any = partial(_contexts)  # a function would be given the attribute for all
    # torch.compile caches graphs with a policy only under a name that stands for its code.
    contexts.cache_hash = "keep attention and matmuls that do not widen"
    return contexts


def _contexts() -> tuple[Any, Any]:
    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, _ComputeAgain(policy, again.storage, again.allow_cache_entry_mutation)


def _set_memory_budget(options: ActivationCheckpoint, pareto_folder: Path | None) -> None:
    """Set the compiler's for this process; 1.0, torch's default, keeps what backward asks for."""
    acts = options.mode == "memory_budget"
    functorch_config.activation_memory_budget = options.memory_budget if acts else 1.0
    functorch_config.visualize_memory_budget_pareto = acts and pareto_folder is not None
    if acts and pareto_folder:
        pareto_folder.mkdir(parents=True, exist_ok=True)
        functorch_config.memory_budget_pareto_dir = str(pareto_folder)
