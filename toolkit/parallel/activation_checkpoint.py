"""Activation checkpointing: save little of a block's forward and recompute the rest in backward.

Selective mode "matmul" saves the outputs of attention and of all matmuls and recomputes everything between
them. The extra FLOPs are negligible, and activations take a quarter less memory than in mode "none" (27.1
instead of 36.1 GiB for 8B and one row of 8,192 tokens, by the dry run). Selective mode "op" decides per
operator, by the FLOPs saved per byte of memory. Saving one output element avoids 2·K FLOPs for a matmul with
inner dimension K, about 2·S for attention over S tokens, and a few for a norm, RoPE or SwiGLU. Therefore
attention is always saved and elementwise operators never are. Matmuls are saved if their output is no wider
than their inner dimension (q, k, v, o, w2): 4.5 D elements per token with 4 queries per key. w1 and w3, which
widen, would take another 7 D at a width of 3.5 D, and save the fewest FLOPs per byte of all matmuls, so they
are recomputed. They are 54% of a block's matmul FLOPs; mode "full" recomputes all matmuls and attention.
Reduce-scatters are saved too: repeating them costs time, though no FLOPs.

Under tensor parallelism the rule applies to a rank's shards: the outputs of w1 and w3 become narrow enough to
save, and the outputs of wo and w2, whose inner dimension shrinks, are saved after their reduce-scatter.
All-gathers are never saved: their output is tp times as large as their input. (In eager mode, wo and w2 are
recomputed although nothing needs them; ``early_stop`` avoids this for w2.)

In every mode, routers choose experts only once: recomputed scores, rounded differently, could choose others,
and gradients would belong to another forward. Blocks recomputed as a whole save the choices (8 bytes each).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.compat import (
    CachedDispatchMode,
    CheckpointWrapper,
    checkpoint_wrapper,
    checkpointed,
    functorch_config,
    operator_is_compiled,
)
from toolkit.config.parallelism import ActivationCheckpoint
from toolkit.hardware import is_simulated
from toolkit.models.common.moe import MoE, Router

CHOICE = "aten::topk"
"""Operator by which routers choose experts."""
SAVED = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torch_attn::_varlen_attn",
        "toolkit::blockwise_attention",
        "flex_attention",
        CHOICE,
        # flex_attention when it is compiled inside a block that is not.
        "inductor_compiled_code",
        "_c10d_functional::reduce_scatter_tensor",
    }
)
"""Operators whose outputs mode "op" always saves, by name: some exist only after an import."""

_LINEARS = {"toolkit::nf4_linear", "toolkit::onednn_linear"}
"""Matmuls with the arguments x (…, K) and the weight (N, …), which may be packed."""
# Index of the second factor (…, K, N) among the arguments of a matmul.
_MATMULS = {"aten::mm": 1, "aten::bmm": 1, "aten::addmm": 2}
_MAY_SAVE = SAVED | _LINEARS | _MATMULS.keys()


def policy(option: str, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether mode "op" or "matmul" saves the output of ``operator``, by the rule in the module
    docstring; option "choice" saves only the choices of routers.

    torch.compile may override PREFER_RECOMPUTE, but not MUST_SAVE.
    """
    name = operator.name()
    if option == "choice":
        save = name == CHOICE
    elif name in _MATMULS:
        factor: Tensor = args[_MATMULS[name]]
        inner, width = factor.shape[-2:]
        save = option == "matmul" or width <= inner
    elif name in _LINEARS:
        x, weight = args[:2]
        save = option == "matmul" or len(weight) <= x.shape[-1]
    else:
        save = name in SAVED
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class _RecomputeMode(CachedDispatchMode):
    """Returns saved outputs only of operators that :func:`policy` may save.

    torch also requires the counts of all other operators to match between the two forwards. These counts
    differ if part of a block is an FSDP unit: its hooks all-gather parameters in one forward, and find them
    gathered in the other. A split backward recomputes twice, which torch allows only in compiled blocks. A
    simulation compiles nothing, so it computes saved outputs again the second time.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # While a graph is traced, all outputs are saved.
        if func.name() in _MAY_SAVE or operator_is_compiled(func, args, kwargs):
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError:
                if not is_simulated():
                    raise
        return func(*args, **kwargs)


class _ChooseOnce:
    """Context of a checkpointed block's first forward and of its recomputations. In it, routers return the
    experts chosen first. Unlike dispatch modes, it costs nothing per operator."""

    def __init__(self, routers: Sequence[Router]):
        self.kept: list[tuple[Router, list[Tensor]]] = [(router, []) for router in routers]

    def __enter__(self) -> None:
        for router, kept in self.kept:
            router.kept = kept

    def __exit__(self, *error: object) -> None:
        for router, _ in self.kept:
            router.kept = None


def routers_of(module: nn.Module) -> list[Router]:
    """Return the routers in ``module``."""
    return [inner for inner in module.modules() if isinstance(inner, Router)]


def _choose_once(routers: Sequence[Router]) -> tuple[_ChooseOnce, _ChooseOnce]:
    context = _ChooseOnce(routers)
    return context, context


def apply_activation_checkpoint(
    blocks: nn.ModuleDict,
    options: ActivationCheckpoint,
    *,
    compiled: bool = False,
    pareto_folder: Path | None = None,
) -> None:
    """Wrap the blocks in place, before they are ``compiled``. Mode "memory_budget" wraps none: it is a
    compiler setting. The compiler plots the cost of each budget into ``pareto_folder``, if set.

    In a block that is compiled in parts, checkpointing per operator applies only within the compiled
    attention; the rest is recomputed."""
    _set_memory_budget(options, pareto_folder if options.visualize_memory_budget_pareto else None)
    if options.mode in ("none", "memory_budget"):
        return
    arguments: dict[str, Any] = {
        "early_stop": options.early_stop,
        "preserve_rng_state": options.preserve_rng_state,
        "determinism_check": options.determinism_check,
        "debug": options.debug,
    }
    by_stride = options.mode == "selective" and not options.by_operator
    stride = int(options.selective_ac_option) if by_stride else 1
    for index, (name, block) in enumerate(list(blocks.items())):
        parts = parts_of(block) if compiled else None
        if parts is not None and options.by_operator:
            contexts = _contexts_of(block, options, compiled)
            parts.attend = _checkpointed(parts.attend, **arguments, **contexts)
            choose_once = partial(_choose_once, routers_of(block))
            parts.moe.forward = _checkpointed(parts.moe.forward, **arguments, context_fn=choose_once)
            parts.checkpointed = True  # for activation offloading
        elif index % stride == 0:
            contexts = _contexts_of(block, options, compiled and parts is None)
            blocks[name] = checkpoint_wrapper(block, **arguments, **contexts)


def parts_of(block: nn.Module) -> Any:
    """Return the block, without the wrapper of its checkpoint, if it is compiled in parts, as
    :mod:`toolkit.parallel.compile` describes; otherwise None."""
    inner: Any = checkpointed(block) if isinstance(block, CheckpointWrapper) else block
    moe = getattr(inner, "moe", None)
    return inner if isinstance(moe, MoE) and moe.experts.dispatch is not None else None


def _checkpointed(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, **arguments)

    return run


def _contexts_of(block: nn.Module, options: ActivationCheckpoint, compiled: bool) -> dict[str, Any]:
    """Return the contexts of both forwards of ``block``, as arguments of the wrapper."""
    if options.by_operator:
        return {"context_fn": _by_policy(options.selective_ac_option)}
    routers = routers_of(block)
    if not routers:
        return {}
    # torch.compile ignores contexts that are no policy.
    return {"context_fn": _by_policy("choice") if compiled else partial(_choose_once, routers)}


@cache  # one object, so that all blocks share one graph
def _by_policy(option: str) -> Callable[[], Any]:
    # torch.compile warns about in-place operators; a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    contexts: Any = partial(_contexts, option)  # a new object, because the function would keep the attribute
    # torch.compile caches graphs with a policy only under a key that identifies the policy's code.
    contexts.cache_hash = f"policy {option}"
    return contexts


def _contexts(option: str) -> tuple[Any, Any]:
    chosen = partial(policy, option)
    forward, again = create_selective_checkpoint_contexts(chosen)
    return forward, _RecomputeMode(chosen, again.storage, again.allow_cache_entry_mutation)


def _set_memory_budget(options: ActivationCheckpoint, pareto_folder: Path | None) -> None:
    """Set the compiler's memory budget in this process; 1.0, torch's default, saves everything that backward
    needs."""
    enabled = options.mode == "memory_budget"
    functorch_config.activation_memory_budget = options.memory_budget if enabled else 1.0
    functorch_config.visualize_memory_budget_pareto = enabled and pareto_folder is not None
    if enabled and pareto_folder:
        pareto_folder.mkdir(parents=True, exist_ok=True)
        functorch_config.memory_budget_pareto_dir = str(pareto_folder)
