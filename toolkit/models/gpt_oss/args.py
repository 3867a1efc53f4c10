"""Presets of the published gpt-oss models (from config.json on the Hub). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import ModelArgs, MoEArgs, YarnScaling

_20B = ModelArgs(
    dim=2880,
    n_layers=24,
    n_heads=64,
    n_kv_heads=8,
    ffn_dim=2880,
    vocab_size=201088,
    head_dim=64,
    rope_theta=150000.0,
    rope_scaling=YarnScaling(32.0, original_max_seq_len=4096, truncate=False),
    max_seq_len=131072,
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    sliding_window=128,
    full_attention_step=2,
    family="gpt_oss",
    # The softmax over the chosen experts is that over all, divided by the sum of the chosen.
    moe=MoEArgs(num_experts=32, top_k=4, ffn_dim=2880, route_norm=True, bias=True, swiglu_limit=7.0),
)
assert _20B.moe is not None

PRESETS = {
    "gpt_oss": {
        # The window is shorter than a debug sequence.
        "debugmodel": replace(
            _20B, dim=256, n_layers=6, n_heads=8, n_kv_heads=2, ffn_dim=256, vocab_size=2048, head_dim=32,
            sliding_window=16, moe=replace(_20B.moe, num_experts=8, top_k=2, ffn_dim=256),
        ),
        "20B": _20B,
        "120B": replace(_20B, n_layers=36, moe=replace(_20B.moe, num_experts=128)),
    }
}  # fmt: skip
