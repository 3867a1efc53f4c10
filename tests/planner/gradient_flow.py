"""Which activations of a block have gradients: those at and behind the first parameter that is trained.

What is before it is computed forward alone: torch neither computes gradients there, nor sends them, nor
computes a checkpointed block again. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

Flow = Mapping[str, bool]
"""By the name of a block's module, whether its output has a gradient; the block's own name is ""."""

BEFORE = "before"
"""The hidden states that a block is given."""
ATTENDED = "attended"
"""The result of attention, from queries, keys and values."""

READS: dict[str, tuple[str, ...]] = {
    "attention_norm": (BEFORE,),
    "attention.wq": ("attention_norm",),
    "attention.wk": ("attention_norm",),
    "attention.wv": ("attention_norm",),
    "attention.q_norm": ("attention.wq",),
    "attention.k_norm": ("attention.wk",),
    ATTENDED: ("attention.q_norm", "attention.k_norm", "attention.wv"),
    "attention.adapter": (ATTENDED,),
    "attention.wo": ("attention.adapter",),
    "attention": ("attention.wo",),
    "ffn_norm": (BEFORE, "attention"),
    "feed_forward.w1": ("ffn_norm",),
    "feed_forward.w3": ("ffn_norm",),
    "feed_forward.w2": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward": ("feed_forward.w2",),
    "": (BEFORE, "attention", "feed_forward"),
}
"""Modules of a block, in order, and whose outputs they read; one that is not there hands on what it reads."""


def gradient_flow(trained: Container[str], *, before: bool) -> Flow:
    """The flow of a block of which the modules called ``trained`` have parameters that are trained, and which
    is given hidden states that have gradients, or have none."""
    has = {BEFORE: before}
    for name in READS:
        has[name] = name in trained or given(has, name)
    return has


def given(flow: Flow, name: str) -> bool:
    """Say if the module ``name`` reads something that has a gradient, and so computes that of its input."""
    return any(flow[read] for read in READS[name])
